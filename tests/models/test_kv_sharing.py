"""Layers that read another layer's keys and values: no projections, no cache, and the tokens of whole sequences."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.llm.engine import Engine, EngineConfig, SamplingParams
from jattn.llm.load import save_model
from jattn.llm.load.plan import plan_parameters
from jattn.llm.models import last_of_each_window
from jattn.llm.models.positions import apply_rotary, inverse_frequencies, rotary_angles
from jattn.llm.models.shapes import num_parameters, parameter_shapes
from tests.support.tiny_models import PagedRun, dense_logits, tiny_config, tiny_model
from torch_core.base.errors import InvalidInput, Unsupported

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
# Windows and their full layers, the last three without keys and values: Gemma 3n's pattern.
WINDOWS = (6, None, 6, 6, None)
SHARED = tiny_config(
    num_hidden_layers=5, layer_windows=WINDOWS, kv_sharing_targets=last_of_each_window(WINDOWS, 3), qk_norm="head"
)


def test_a_layer_attends_to_the_keys_and_values_of_its_target(seed) -> None:
    config = tiny_config(kv_sharing_targets=(None, 0))
    model, tokens = tiny_model(config, seed), np.random.default_rng(seed).integers(0, 257, 9)
    states = [np.asarray(state[0]) for state in model.hidden_states(jnp.asarray(tokens[None]))]
    layers: Any = model.layers
    target, own = (layers[index] for index in (0, 1))
    size, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads

    def projected(layer: Any, x: Any) -> Any:
        return jnp.asarray(layer.self_attn.qkv_proj(layer.input_layernorm(x))).reshape(len(tokens), -1, size)

    angles = rotary_angles(jnp.arange(len(tokens)), inverse_frequencies(config))
    keys, values = jnp.split(projected(target, states[0])[:, heads:], 2, axis=1)
    query, keys = (
        np.asarray(apply_rotary(each, *angles)).astype(np.float64) for each in (projected(own, states[1]), keys)
    )
    keys, values = (np.repeat(np.float64(each), heads // kv_heads, axis=1) for each in (keys, values))
    scores = np.einsum("qhd,khd->hqk", query, keys) * size**-0.5
    scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values).reshape(len(tokens), -1)
    x = states[1] + np.asarray(own.self_attn.o_proj(attended.astype(np.float32)))

    expected = x + np.asarray(own.mlp(own.post_attention_layernorm(x)))

    np.testing.assert_allclose(states[2], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_the_paged_path_says_what_whole_sequences_say(seed) -> None:
    model = tiny_model(SHARED, seed)
    tokens = np.random.default_rng(seed).integers(0, 257, 20)
    paged = PagedRun(model)

    found = np.concatenate([paged.step([part])[0] for part in np.split(tokens, [7, 16, 17])])

    assert len(paged.caches) == 2
    whole = dense_logits(model, tokens)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-5 * np.abs(whole).max())


@pytest.mark.nightly
def test_the_engine_keeps_caches_for_the_layers_that_write_them(seed) -> None:
    model = tiny_model(SHARED, seed)
    engine = Engine(model, EngineConfig(block_size=4, max_num_seqs=2, max_num_batched_tokens=16))
    prompt = np.random.default_rng(seed).integers(0, 257, 13).tolist()

    request = engine.add(prompt, GREEDY)
    while engine.num_unfinished:
        engine.step()

    tokens = list(prompt)
    for token in request.output_token_ids:
        assert int(dense_logits(model, np.asarray(tokens))[-1].argmax()) == token
        tokens.append(token)
    assert (engine.pool_plan.num_layers, engine.pool_plan.num_groups) == (1, 2)


def test_a_layer_that_shares_has_neither_key_nor_value_parameters() -> None:
    shapes = parameter_shapes(SHARED)

    assert shapes["layers", 1, "self_attn", "qkv_proj", "kernel"] == (48, 4 * 16 + 2 * 2 * 16)
    assert shapes["layers", 2, "self_attn", "qkv_proj", "kernel"] == (48, 4 * 16)
    assert ("layers", 1, "self_attn", "k_norm", "weight") in shapes
    assert ("layers", 2, "self_attn", "k_norm", "weight") not in shapes
    assert num_parameters(SHARED) == sum(int(np.prod(shape)) for shape in shapes.values())


def test_no_family_stores_such_a_model_silently(tmp_path, seed) -> None:
    with pytest.raises(Unsupported, match="kv_sharing_targets"):
        save_model(tmp_path, tiny_model(SHARED, seed), SHARED)
    with pytest.raises(Unsupported, match="kv_sharing_targets"):
        plan_parameters(SHARED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((None,), "kv_sharing_targets has 1 entries; it must have one for each of the 3 layers, or none."),
        ((None, None, 2), "kv_sharing_targets[2] is 2; it must be from 0 to 1, or None."),
        ((0, None, None), "kv_sharing_targets[0] is 0; it must be"),
        (
            (None, 0, 1),
            "kv_sharing_targets[2] is 1, which has no keys and values of its own; name the layer that has.",
        ),
    ],
)
def test_a_target_that_has_nothing_to_share_is_refused(changes, message) -> None:
    with pytest.raises(InvalidInput) as error:
        tiny_config(num_hidden_layers=3, kv_sharing_targets=changes)

    assert str(error.value).startswith(message)


def test_a_target_of_another_window_is_refused() -> None:
    with pytest.raises(InvalidInput) as error:
        tiny_config(layer_windows=(6, None), kv_sharing_targets=(None, 0))

    assert str(error.value) == (
        "kv_sharing_targets[1] is 0, whose window is 6; layer 1 has None. Layers that share keys and values keep the "
        "same part of the past."
    )


def test_sharing_layers_find_no_layer_of_their_window() -> None:
    with pytest.raises(InvalidInput) as error:
        last_of_each_window([6, 6, None, 6], 2)

    assert str(error.value) == (
        "num_kv_shared_layers is 2; layer 2 has the window None, and none of the 2 layers with keys and values has."
    )
