"""An engine over several devices: the tokens of one device, two sums a layer, and nothing large gathered."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jattn import ops
from jattn.bench.shapes import shape_config
from jattn.llm.engine import Engine, EngineConfig, SamplingParams, calibrate_kv_cache
from jattn.llm.engine.device.buckets import Bucket
from jattn.llm.engine.device.placement import Placement
from jattn.llm.engine.device.sampler import Sampler
from jattn.llm.engine.options.params import SamplingKind
from jattn.llm.models import Decoder, TensorParallel, partition_specs, shard_model
from jattn.llm.text.embeddings import embed
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import run
from tests.support.devices import mesh, on_four_devices
from tests.support.pretended_gpu import pretended_gpu
from torch_core.base.errors import InvalidInput, Unsupported

SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 32, "max_num_batched_tokens": 64, "max_model_len": 64}
COLLECTIVE = re.compile(r"= (\([^)]*\)|\S+) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(")


def prompts_of(seed: int, count: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 97, random.integers(1, 24)).tolist() for _ in range(count)]


def large_decoder(**changes: Any) -> Decoder:
    """Weights so large that the layers, and not the embedding alone, decide what comes next."""
    graph, state = nnx.split(tiny_decoder(implementation="xla", **changes))
    return nnx.merge(graph, jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) * 0.2, state))


def one_and_four(**changes: Any) -> tuple[Engine, Engine]:
    model = large_decoder(**changes)
    return Engine(model, EngineConfig(**SIZES)), Engine(model, EngineConfig(**SIZES, tensor_parallel_size=4))


def mesh_of(engine: Engine) -> Any:
    sharding = engine._core.device.pool.sharding
    assert sharding is not None
    return sharding.mesh


@on_four_devices
def test_tokens_of_40_prompts_are_those_of_one_device() -> None:
    one, four = one_and_four()
    prompts = prompts_of(1, 40)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    assert run(four, prompts, greedy) == run(one, prompts, greedy)


@on_four_devices
@pytest.mark.nightly
def test_sampled_tokens_and_their_log_probabilities_are_those_of_one_device() -> None:
    one, four = one_and_four()
    prompts = prompts_of(2, 6)
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8, "repetition_penalty": 1.2},
        {"logit_bias": {3: 2.0}, "min_p": 0.01},
        {"logprobs": 3, "prompt_logprobs": 2},
    ]
    params = [SamplingParams(max_tokens=6, seed=7, ignore_eos=True, **each) for each in options]
    found = []
    for engine in (one, four):
        requests = [engine.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        while engine.num_unfinished:
            engine.step()
        found.append(requests)

    expected, requests = found
    assert [each.output_token_ids for each in requests] == [each.output_token_ids for each in expected]
    for ours, theirs in zip(requests[-1].logprobs, expected[-1].logprobs, strict=True):
        np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=1e-5)
    assert requests[-1].prompt_logprobs.keys() == expected[-1].prompt_logprobs.keys()


@on_four_devices
def test_a_layer_sums_twice_and_no_weight_cache_or_vocabulary_is_gathered() -> None:
    _, four = one_and_four()
    run(four, prompts_of(3, 2), SamplingParams(max_tokens=6, ignore_eos=True))

    programs = four._core.device.runner.programs
    texts = {str(bucket): compiled.as_text() for bucket, compiled in programs.compiled.items()}
    # Others of this shape may have been compiled before.
    plain = {name: text for name, text in texts.items() if name.endswith("plain")}
    assert plain
    for name, text in plain.items():
        found = COLLECTIVE.findall(text)
        kinds = Counter(kind for _, kind in found)
        # The embedding, two layers of two, and the largest logit, which a temperature is applied below.
        assert kinds["all-reduce"] == 6, name
        # The best token of each device, as a value and an id, of the greedy and of the drawn choice.
        assert set(kinds) == {"all-reduce", "all-gather"}, name
        gathered = [shape for shape, kind in found if kind == "all-gather"]
        assert all(re.match(r"\(?s32\[4,2,\d+\]", shape) for shape in gathered), (name, gathered)


@pytest.mark.parametrize("guesses", [0, 2])
@on_four_devices
def test_nothing_empty_goes_into_or_out_of_the_part_of_a_device(guesses: int) -> None:
    # XLA's GPU compiler dies of it: see `Placement.mapped`.
    speculation = {"method": "ngram", "num_speculative_tokens": guesses} if guesses else None
    processors = {"lift": lambda logits, *_: logits.at[:].add(1.0)}
    config = EngineConfig(
        **SIZES,
        tensor_parallel_size=4,
        speculative_config=speculation,
        logits_processors=processors if guesses else None,
    )
    engine = Engine(tiny_decoder(implementation="xla", num_hidden_layers=1), config)
    runner = engine._core.device.runner
    largest = [bucket for bucket in runner.buckets.all() if bucket.num_seqs == SIZES["max_num_seqs"]]
    kinds = {(each.sampler.kind, each.num_steps, each.max_query_len > 1 + guesses): each for each in largest}
    assert len(kinds) == (4 if guesses else 6)

    for bucket in kinds.values():
        jaxpr = runner.programs._traced(bucket).jaxpr
        (mapped,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "shard_map"]
        assert all(each.aval.size for each in (*mapped.invars, *mapped.outvars)), bucket


@on_four_devices
def test_new_weights_come_from_a_trainers_mesh_and_compile_nothing() -> None:
    model, other = tiny_decoder(implementation="xla"), large_decoder()
    config = EngineConfig(**SIZES, tensor_parallel_size=4)
    engine, prompts = Engine(model, config), prompts_of(4, 3)
    run(engine, prompts)
    before = engine.num_compilations
    trainer = mesh("auto", dp=2, tp=2)
    rules = {name: None if name == "vocab" else "tp" for name in ("vocab", "heads", "kv_heads", "mlp")}
    specs = partition_specs(other, rules | {"embed": None})
    state = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(trainer, spec)), nnx.state(other), specs)

    engine.update_weights(state)
    assert run(engine, prompts) == run(Engine(other, config), prompts)
    engine.update_weights(shard_model(other, mesh_of(engine)))
    assert run(engine, prompts) == run(Engine(other, config), prompts)
    assert engine.num_compilations == before


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@on_four_devices
def test_a_mesh_that_a_trainer_has_set_changes_nothing(kind: str) -> None:
    model, prompts, over = large_decoder(num_hidden_layers=1), prompts_of(5, 3), mesh(kind, dp=2, tp=2)
    sizes: dict[str, Any] = SIZES | {"num_scheduler_steps": 1}
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    expected = run(Engine(model, EngineConfig(**sizes)), prompts, greedy)

    with jax.set_mesh(over):
        spread = jax.device_put(nnx.state(model), NamedSharding(over, PartitionSpec()))
        trained = nnx.merge(nnx.graphdef(model), spread)
        for parts in (1, 2):
            engine = Engine(trained, EngineConfig(**sizes, tensor_parallel_size=parts))
            assert run(engine, prompts, greedy) == expected
            engine.update_weights(spread)
            assert run(engine, prompts, greedy) == expected


@pytest.mark.parametrize("origin", ["none", "config", "checkpoint"])
@on_four_devices
def test_scales_of_an_8_bit_cache_are_on_every_device(origin: str) -> None:
    model, prompts = large_decoder(num_hidden_layers=1), prompts_of(6, 3)
    scales = calibrate_kv_cache(model, prompts)
    if origin == "checkpoint":
        attention: Any = model.layers[0].self_attn
        attention.set_kv_scales(*scales.of("layers.0.self_attn.paged_attention", "float8_e4m3fn"))
    sizes: dict[str, Any] = SIZES | {"num_scheduler_steps": 1, "kv_cache_dtype": "fp8"}
    sizes |= {"kv_cache_scales": scales if origin == "config" else None}
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    one, two = (Engine(model, EngineConfig(**sizes, tensor_parallel_size=size)) for size in (1, 2))

    assert run(two, prompts, greedy) == run(one, prompts, greedy)
    for engine in (one, two):
        engine.set_kv_cache_scales(scales)
    assert run(two, prompts, greedy) == run(one, prompts, greedy)
    with pytest.raises(Unsupported, match=r"^model is cut over 4 devices, of which each would see its own heads alone"):
        calibrate_kv_cache(shard_model(model, mesh("auto", tp=4)), prompts)


@on_four_devices
def test_vectors_of_a_model_that_is_cut_are_refused() -> None:
    cut = shard_model(tiny_decoder(), mesh("auto", tp=4))
    with pytest.raises(Unsupported, match=r"^model is cut over 4 devices; vectors come from a whole one: "):
        embed(cut, [[1, 2]], pooling="mean", normalize=True)


@on_four_devices
def test_the_pool_takes_its_bytes_on_each_device() -> None:
    one, four = (
        Engine(
            tiny_decoder(implementation="xla"),
            EngineConfig(block_size=4, kv_cache_bytes=1 << 17, tensor_parallel_size=size),
        )
        for size in (1, 2)
    )
    pool = four._core.device.pool
    assert pool.sharding == NamedSharding(mesh_of(four), PartitionSpec(None, None, None, "tp"))
    assert pool.num_blocks == 2 * one._core.device.pool.num_blocks


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "devices": (
        {"tensor_parallel_size": 4, "data_parallel_size": 2},
        InvalidInput,
        "tensor_parallel_size is 4 and data_parallel_size 2, 8 devices in all; there are 4.",
    ),
    "heads": ({"tensor_parallel_size": 3}, InvalidInput, "num_attention_heads is 4; it must be a multiple of"),
}


@pytest.mark.parametrize("case", REFUSED)
@on_four_devices
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(case: str) -> None:
    sizes, error, message = REFUSED[case]
    with pytest.raises(error, match=f"^{message}"):
        Engine(tiny_decoder(implementation="xla"), EngineConfig(**SIZES, **sizes))


@on_four_devices
def test_a_model_that_is_cut_otherwise_than_the_engine_is_refused() -> None:
    over = mesh("auto", tp=4)
    cut = shard_model(tiny_decoder(implementation="xla"), over)
    with pytest.raises(InvalidInput, match=r"^model is cut over 4 devices; give the engine its mesh: "):
        Engine(cut, EngineConfig(**SIZES))
    with pytest.raises(InvalidInput, match=r"^model is cut over 4 devices of axis 'tp'; the engine's mesh has 2 of"):
        Engine(cut, EngineConfig(**SIZES, tensor_parallel_size=2))
    turned = jax.sharding.Mesh(over.devices[::-1], ("tp",))
    with pytest.raises(InvalidInput, match=r"lies on devices 0, 1, 2, 3; the engine's mesh has devices 3, 2, 1, 0\."):
        Engine(cut, EngineConfig(**SIZES, mesh=turned))
    assert run(Engine(cut, EngineConfig(**SIZES, mesh=over)), [[1, 2, 3]])


@pytest.mark.parametrize(
    ("kind", "axes"), [("explicit", {"tp": 4}), ("auto", {"dp": 1, "tp": 4}), ("explicit", {"dp": 1, "tp": 4})]
)
@on_four_devices
def test_a_model_that_is_cut_over_a_mesh_of_any_kind_stays_where_it_is(kind: str, axes: dict[str, int]) -> None:
    model, prompts, over = large_decoder(), prompts_of(6, 3), mesh(kind, **axes)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    cut = shard_model(model, over)

    engine = Engine(cut, EngineConfig(**SIZES, mesh=over))

    assert run(engine, prompts, greedy) == run(Engine(model, EngineConfig(**SIZES)), prompts, greedy)
    places = [
        [part.data.unsafe_buffer_pointer() for leaf in leaves for part in leaf.addressable_shards]
        for leaves in (jax.tree.leaves(nnx.state(cut)), engine._core.device.runner.weights.leaves)
    ]
    assert places[0] == places[1]


@on_four_devices
def test_a_module_that_nobody_can_cut_is_refused() -> None:
    class Own(nnx.Module):
        paged_spec = tiny_decoder(implementation="xla").paged_spec
        logits = None

        def __call__(self, *_: Any) -> Any: ...

    Own.logits = Own.__call__  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(Unsupported, match=r"^model is a Own, which says not how it is cut over 2 devices\. "):
        Engine(Own(), EngineConfig(**SIZES, tensor_parallel_size=2))  # pyright: ignore[reportArgumentType]


@on_four_devices
def test_a_mesh_names_its_axes_and_gives_the_sizes() -> None:
    assert EngineConfig(mesh=mesh("auto", dp=2, tp=2)).data_parallel_size == 2
    with pytest.raises(InvalidInput, match=r"^mesh has the axes model \(4\); an engine's has 'tp' and may have 'dp'"):
        EngineConfig(mesh=mesh("auto", model=4))
    with pytest.raises(InvalidInput, match=r"^tensor_parallel_size is 2; axis 'tp' of the mesh has 4 devices\.$"):
        EngineConfig(mesh=mesh("auto", tp=4), tensor_parallel_size=2)
    with pytest.raises(InvalidInput, match=r"^tensor_parallel_size is 0; "):
        EngineConfig(tensor_parallel_size=0)
    assert TensorParallel(size=2).parts("vocab") == 2


def test_what_devices_sum_with_is_made_anew_with_the_pool_and_not_between(decoder, monkeypatch) -> None:
    made: list[Placement] = []
    monkeypatch.setattr(Placement, "peers", lambda placement: made.append(placement))
    engine = Engine(decoder, EngineConfig(**SIZES))
    device = engine._core.device
    counts = [len(made)]

    for renew in (False, True, False):
        if renew:
            device.pool.renew()
        device.forget()
        counts.append(len(made))

    assert counts == [1, 1, 2, 2]


@on_four_devices
def test_what_an_engine_on_one_of_several_devices_traces_launches_kernels() -> None:
    found = {}

    def look(name: str, placement: Placement) -> None:
        step = placement.mapped(lambda: found.update({name: ops.launches_kernels(None)}), (), None)
        jax.jit(step)()

    with pretended_gpu():
        look("one", Placement())
        look("four", Placement(mesh("auto", tp=4)))
        with jax.set_mesh(mesh("auto", tp=4)):
            look("cut by XLA", Placement(mesh("auto", tp=4), by_compiler=True))
    assert found == {"one": True, "four": True, "cut by XLA": False}


@on_four_devices
@pytest.mark.parametrize(
    ("kind", "devices", "tokens"),
    [*(("attention_mamba", *each) for each in ((0, 1), (0, 2), (1, 1), (2, 1))), ("mamba", 0, 1)],
)
def test_decode_steps_of_two_mixers_run_kernels_side_by_side_on_one_device(
    kind: str, devices: int, tokens: int, monkeypatch
) -> None:
    config = replace(shape_config("tiny-hybrid"), layer_types=(kind, "attention"), num_hidden_layers=2)
    sizes: dict[str, Any] = SIZES if devices == 0 else SIZES | {"mesh": mesh("auto", tp=devices)}
    engine = Engine(Decoder(config, rngs=nnx.Rngs(0)), EngineConfig(**sizes))
    programs = engine._core.device.runner.programs
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(programs, "on_gpu", True)

    bucket = Bucket(1, tokens, tokens, Sampler(SamplingKind.PLAIN))
    programs._compile(SimpleNamespace(compile=lambda compiler_options: asked.append(compiler_options)), bucket)

    expected = kind == "attention_mamba" and devices < 2 and tokens == 1
    assert (asked[0].get("xla_gpu_command_buffer_scheduling_mode") == "CONCURRENT") == expected


@pytest.mark.parametrize(("num_rows", "expected"), [(16, "CONCURRENT"), (32, None), (64, "CONCURRENT"), (128, None)])
def test_decode_steps_of_few_rows_with_adapters_run_kernels_side_by_side(num_rows: int, expected: str | None) -> None:
    engine = Engine(Decoder(shape_config("tiny"), rngs=nnx.Rngs(0)), EngineConfig(**SIZES, enable_lora=True))
    bucket = Bucket(num_rows, num_rows, 1, Sampler(SamplingKind.PLAIN), adapters=True)

    options = engine._core.device.runner.programs._options(bucket)

    assert options.get("xla_gpu_command_buffer_scheduling_mode") == expected
