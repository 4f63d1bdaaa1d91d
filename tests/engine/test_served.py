"""`Served`: models in the styles of projects that train with JAX, whose layers run as they are."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.llm.engine import Engine, EngineConfig, SamplingParams
from jattn.llm.engine.device.weights import Structure
from jattn.llm.models import PagedSpec, Served
from tests.engine.test_engine import prompts_of
from tests.support.adopters import (
    VOCAB_SIZE,
    Attention,
    CausalLM,
    Config,
    InPlaceModel,
    PretrainedConfig,
    Remat,
    Transformer,
    rotated,
)
from torch_core.base.errors import InvalidInput, Unsupported

# Few programs to compile.
CONFIG = EngineConfig(
    block_size=4, max_num_seqs=2, max_num_batched_tokens=64, num_blocks=32, num_scheduler_steps=1, fixed_shapes=True
)
LONGEST = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)


def spec_of(config: Any, **further: Any) -> PagedSpec:
    sizes = {"num_layers": config.num_layers, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    return PagedSpec(vocab_size=VOCAB_SIZE, max_model_len=64, **{**sizes, **further})


class Paged(nnx.Module):
    """The attention of tunix and of flax's gemma, over the engine's cache."""

    def __init__(self, attn: Attention) -> None:
        self.attn = attn

    def __call__(self, x: jax.Array, positions: jax.Array, cache: Any, mask: Any) -> Any:
        attn = self.attn
        q, k = (rotated(proj(x), positions) for proj in (attn.q_proj, attn.k_proj))
        out = cache.attend(q, k, attn.v_proj(x), scale=8**-0.5, logits_soft_cap=attn.config.soft_cap)
        return cache, attn.o_proj(out)


def served_transformer(model: Transformer) -> Served:
    def forward(model: Transformer, tokens: jax.Array, positions: jax.Array, cache: Any) -> jax.Array:
        for layer in model.layers:
            cast(Any, layer).attn = Paged(layer.attn)
        return model(tokens, positions, {f"layer_{index}": each for index, each in enumerate(cache)}, None)[0]

    spec = spec_of(model.config, layer_windows=model.config.windows)
    return Served(model, spec, forward, num_heads=model.config.num_heads, implementation="torch")


def served_causal_lm(model: CausalLM) -> Served:
    def forward(model: CausalLM, tokens: jax.Array, positions: jax.Array, cache: Any) -> jax.Array:
        paged = Paged(model.attn)
        cast(Any, model).attn = lambda x, positions, _, mask: paged(x, positions, cache[0], mask)
        adapters = cache.metadata.of_tokens(cache.metadata.inputs["adapter"], tokens.size)[None]
        found = model(tokens, attention_mask=None, positions=positions, adapter_indices=adapters)
        return found["last_hidden_state"]

    spec = spec_of(model.attn.config, inputs={"adapter": "int32"})
    return Served(
        model, spec, forward, num_heads=4, logits=lambda model, x: model.compute_logits(x), implementation="torch"
    )


def served_in_place(model: InPlaceModel) -> Served:
    def forward(model: InPlaceModel, tokens: jax.Array, positions: jax.Array, cache: Any) -> jax.Array:
        paged = Paged(model.attn.core)
        cast(Any, model).attn = lambda x, own, segment_ids: paged(x, positions, own, None)[1]
        return model(tokens, jnp.ones_like(tokens), cache)

    return Served(model, spec_of(model.config), forward, num_heads=4, implementation="torch")


STYLES: dict[str, Any] = {
    "tunix": (lambda rngs: Transformer(Config(), rngs), served_transformer),
    "gemma": (
        lambda rngs: Transformer(Config(num_layers=2, windows=(4, None), soft_cap=3.0), rngs),
        served_transformer,
    ),
    "skyrl": (
        lambda rngs: CausalLM(PretrainedConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2), rngs),
        served_causal_lm,
    ),
    "bonsai": (lambda rngs: InPlaceModel(Config(), rngs), served_in_place),
}


def run(engine: Engine, prompts: list[list[int]], inputs: list[Any] | None = None) -> list[Any]:
    inputs = inputs or [None] * len(prompts)
    requests = [engine.add(prompt, GREEDY, inputs=each) for prompt, each in zip(prompts, inputs, strict=True)]
    while engine.num_unfinished:
        engine.step()
    return requests


def check_equal(model: Any, engine: Engine, prompts: list[list[int]]) -> None:
    """Compares the engine's greedy tokens and log-probabilities with the model's own dense pass."""
    inputs = [{"adapter": index} for index in range(len(prompts))] if isinstance(model, CausalLM) else None
    dense = nnx.jit(lambda model, tokens, *adapter: jax.nn.log_softmax(model.dense(tokens, *adapter)[0]))
    for index, (prompt, request) in enumerate(zip(prompts, run(engine, prompts, inputs), strict=True)):
        whole = [*prompt, *request.output_token_ids]
        padded = jnp.asarray([whole + [0] * (LONGEST - len(whole))])
        adapter = [] if inputs is None else [index]
        expected = np.asarray(dense(model, padded, *adapter))[len(prompt) - 1 : len(whole) - 1]
        assert expected.argmax(-1).tolist() == request.output_token_ids
        found = [float(each.logprob) for each in request.logprobs]
        np.testing.assert_allclose(found, expected.max(-1), atol=1e-5)


@pytest.mark.parametrize("style", STYLES)
def test_a_model_of_this_style_says_in_the_engine_what_its_own_dense_pass_says(style: str, seed: int) -> None:
    make, serve = STYLES[style]
    model = make(nnx.Rngs(seed))

    check_equal(model, Engine(serve(model), CONFIG), prompts_of(seed, 5, 18))

    assert len(inspect.getsource(Paged).splitlines()) + len(inspect.getsource(serve).splitlines()) <= 40


def test_an_update_in_place_of_a_served_model_reaches_the_engine(seed: int) -> None:
    model = Transformer(Config(), nnx.Rngs(seed))
    prompts = prompts_of(seed, 9)
    engine = Engine(served_transformer(model), CONFIG)
    check_equal(model, engine, prompts)
    compiled = engine.num_compilations

    nnx.update(model, jax.tree.map(lambda leaf: leaf[::-1], nnx.state(model)))
    check_equal(model, engine, prompts)

    assert (engine.weights_version, engine.num_compilations) == (1, compiled)


def test_a_mesh_of_the_trainer_does_not_reach_the_engine(seed: int) -> None:
    model = Transformer(Config(), nnx.Rngs(seed))
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"))
    with warnings.catch_warnings(action="ignore"), mesh, jax.set_mesh(mesh):
        engine = Engine(served_transformer(model), CONFIG)
        check_equal(model, engine, prompts_of(seed, 5))


def test_layers_that_are_computed_again_for_gradients_keep_what_they_wrote(seed: int) -> None:
    model = Transformer(Config(remat=Remat.DECODER), nnx.Rngs(seed))

    check_equal(model, Engine(served_transformer(model), CONFIG), prompts_of(seed, 5))


def test_structures_with_a_config_that_can_change_are_equal_to_no_other() -> None:
    def structure(config: Any) -> Structure:
        module: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        module.config = config
        graph, state = nnx.split(module)
        return Structure(graph, jax.tree.structure(state))

    config = Config()
    plain, changeable = structure((1, 2)), structure(config)

    assert len({plain, structure((1, 2)), structure((1, 3)), changeable, changeable, structure(config)}) == 4


def test_a_layer_that_does_not_attend_is_named(seed: int) -> None:
    model = Transformer(Config(), nnx.Rngs(seed))
    served = Served(model, spec_of(model.config), lambda model, tokens, *_: model.embedder(tokens), num_heads=4)
    engine = Engine(served, CONFIG)

    with pytest.raises(InvalidInput, match=r"^forward did not call attend of cache\[0\] \(1 of 1 layers\)"):
        run(engine, prompts_of(seed, 5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "folder"}, "model is a str; it must be Module."),
        ({"spec": None}, "spec is a NoneType; it must be PagedSpec."),
        ({"forward": None}, "forward is a NoneType; it must be a function."),
        ({"logits": 3}, "logits is a int; it must be a function."),
        ({"spec": replace(spec_of(Config()), kv_lora_rank=8, num_kv_heads=1)}, "spec.kv_lora_rank is 8; Served has"),
        (
            {"spec": replace(spec_of(Config()), max_encoder_len=8, decoder_start_token_id=0)},
            "spec.max_encoder_len is 8",
        ),
        ({"num_heads": 3}, "num_heads is 3 and num_kv_heads 2; both must be positive and the first a multiple"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    config = Config()
    good = {"model": nnx.Embed(2, 2, rngs=nnx.Rngs(0)), "spec": spec_of(config), "forward": print, "num_heads": 4}
    with pytest.raises((InvalidInput, Unsupported)) as error:
        Served(**{**good, **changes})

    assert str(error.value).startswith(message)
