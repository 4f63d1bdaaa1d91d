"""Models that are cut by their own sharding annotations: one device's tokens, and no parameter is gathered."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jattn.llm.engine import Engine, EngineConfig, SamplingParams
from jattn.llm.models import PagedSpec
from jattn.nn import GatedDeltaNet, PagedAttention
from tests.engine.test_engine import prompts_of, run
from tests.support.devices import mesh, on_four_devices
from torch_core.base.errors import InvalidInput

SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
RULES = (("heads", "tp"), ("mlp", "tp"), ("vocab", "tp"), ("embed", None))


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, eager: bool) -> None:
        def param(axes: tuple[str | None, ...], *shape: int) -> Any:
            return nnx.Param(jax.random.normal(rngs(), shape) * 0.3, out_sharding=axes, eager_sharding=eager)

        self.query = param(("embed", "heads", None), 32, 8, 16)
        self.key, self.value = (param(("embed", "heads", None), 32, 4, 16) for _ in range(2))
        self.out = param(("heads", None, "embed"), 8, 16, 32)
        self.up, self.down = param(("embed", "mlp"), 32, 64), param(("mlp", "embed"), 64, 32)
        self.core = PagedAttention(8, 16, num_kv_heads=4)

    def __call__(self, x: Any, cache: Any, metadata: Any) -> Any:
        query, key, value = (jnp.einsum("te,ehd->thd", x, w[...]) for w in (self.query, self.key, self.value))
        attended, cache = self.core(query, key, value, cache, metadata)
        x = x + jnp.einsum("thd,hde->te", attended, self.out[...])
        return x + jax.nn.silu(x @ self.up[...]) @ self.down[...], cache


class Annotated(nnx.Module):
    paged_spec = PagedSpec(vocab_size=96, max_model_len=64, num_layers=2, num_kv_heads=4, head_dim=16)

    def __init__(self, seed: int = 0, *, eager: bool = False, **changes: Any) -> None:
        rngs = nnx.Rngs(seed)
        vocab = {"out_sharding": ("vocab", "embed"), "eager_sharding": eager, **changes}
        self.table = nnx.Param(jax.random.normal(rngs(), (96, 32)), **vocab)
        self.layers = nnx.List([Layer(rngs, eager) for _ in range(2)])
        self.norm = nnx.Param(jnp.ones(32))

    def __call__(self, token_ids: Any, positions: Any, kv_caches: Any, metadata: Any) -> Any:
        x, caches = self.table[...][token_ids], []
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            x, cache = layer(x, cache, metadata)
            caches.append(cache)
        return x * self.norm[...], tuple(caches)

    def logits(self, hidden: Any) -> Any:
        return hidden @ self.table[...].T


class AnnotatedHybrid(Annotated):
    """Its first layer keeps states of a convolution and of a delta rule, cut by channels and by heads."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.mixer = GatedDeltaNet(8, 32, num_kv_heads=4, key_dim=8, value_dim=4, rngs=nnx.Rngs(seed))
        for linear, axes in ((self.mixer.in_proj, ("embed", "heads")), (self.mixer.out_proj, ("heads", "embed"))):
            linear.kernel = nnx.Param(linear.kernel[...], out_sharding=axes, eager_sharding=False)
        self.paged_spec = replace(Annotated.paged_spec, num_layers=1, states=(self.mixer.state_spec(),))

    def __call__(self, token_ids: Any, positions: Any, kv_caches: Any, metadata: Any) -> Any:
        x, (cache, *states) = self.table[...][token_ids], kv_caches
        mixed, states = self.mixer(x, states=tuple(states), metadata=metadata)
        x, cache = self.layers[0](x + mixed, cache, metadata)
        return x * self.norm[...], (cache, *states)


def config(size: int, **options: Any) -> EngineConfig:
    return EngineConfig(**{**SIZES, "tensor_parallel_size": size, "logical_axis_rules": RULES, **options})


DRAWN = SamplingParams(seed=5, top_k=20, max_tokens=6, logprobs=2, ignore_eos=True)


def check_collectives(engine: Engine) -> None:
    """Fails if a compiled program gathers an array of a parameter's shape."""
    whole = {"96,32", "32,96", "32,8,16", "32,4,16", "8,16,32", "32,64", "64,32"}
    for compiled in engine._core.device.runner.programs.compiled.values():
        text = compiled.as_text()
        assert "all-reduce" in text
        gathered = re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-(?:gather|to-all)", text)
        assert not whole.intersection(gathered), gathered


@pytest.mark.parametrize(
    ("size", "params"), [(2, DRAWN), pytest.param(4, GREEDY, marks=pytest.mark.nightly)], ids=["2", "4"]
)
@on_four_devices
def test_tokens_are_those_of_one_device_and_new_weights_come_from_a_trainers_mesh(size, params) -> None:
    trainer = mesh("auto", fsdp=2, tp=2)
    with jax.set_mesh(trainer), nnx.logical_axis_rules(RULES):
        # As flax makes annotated variables by default: where the annotations say, on the mesh of the context.
        model = Annotated(eager=True)
    other, prompts = Annotated(1), prompts_of(3, 3, 21, 9)
    one, many = Engine(model, config(1)), Engine(model, config(size))

    assert run(many, prompts, params) == run(one, prompts, params)

    before = many.num_compilations
    state = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(trainer, PartitionSpec("fsdp"))), nnx.state(other))
    many.update_weights(state)
    one.update_weights(other)
    assert run(many, prompts, params) == run(one, prompts, params)
    assert many.num_compilations == before


@pytest.mark.nightly
@on_four_devices
def test_states_are_cut_by_heads_and_change_no_token() -> None:
    model, prompts = AnnotatedHybrid(), prompts_of(3, 3, 21, 9)
    engine, alone = (Engine(model, config(size, fixed_shapes=True)) for size in (2, 1))

    assert run(engine, prompts, GREEDY) == run(alone, prompts, GREEDY)
    pool = engine._core.device.pool
    found = [cast(Any, array).addressable_data(0).shape[1:] for array in pool._arrays[1:]]
    assert found == [(3, 48), (4, 4, 8)]


@on_four_devices
def test_every_device_keeps_its_part_of_parameters_and_cache_and_no_parameter_is_gathered() -> None:
    engine = Engine(Annotated(), config(4))
    run(engine, prompts_of(4, 5), GREEDY)
    runner, pool = engine._core.device.runner, engine._core.device.pool

    assert cast(Any, pool._arrays)[0].addressable_data(0).shape[3] == 1
    parts = {leaf.sharding.shard_shape(leaf.shape) for leaf in runner.weights.leaves}
    assert parts == {(24, 32), (32, 2, 16), (32, 1, 16), (2, 16, 32), (32, 16), (16, 32), (32,)}
    check_collectives(engine)


@on_four_devices
def test_annotations_that_do_not_fit_are_refused_by_name() -> None:
    cases = [
        (Annotated(), {"logical_axis_rules": RULES[:2]}, r"^layers\.0\.down is annotated with \('tp', 'embed'\); the "),
        (Annotated(out_sharding=(None, None, "tp")), {}, r"^table is annotated with .*; it has 2 axes"),
        (Annotated(out_sharding=("fsdp", None)), {}, r"the axes tp; say where 'fsdp' goes, .*\(\('fsdp', None\),\)\)"),
        (Annotated(), {"decode_context_parallel_size": 2}, r"^decode_context_parallel_size is 2"),
    ]
    for model, options, message in cases:
        with pytest.raises(Exception, match=message):
            Engine(model, config(2, **options))
    uneven = Annotated()
    uneven.norm = nnx.Param(jnp.ones(33), out_sharding=("heads",), eager_sharding=False)
    with pytest.raises(InvalidInput, match=r"^norm has shape \(33,\) and is annotated with .*; 2 devices must divide "):
        Engine(uneven, config(2))
    with pytest.raises(InvalidInput, match=r"^logical_axis_rules\[0\] is \('heads', 'fsdp'\); "):
        EngineConfig(logical_axis_rules=[("heads", "fsdp")])
