"""Decoders cut over a mesh axis: the same logits, two sums a layer, nothing gathered, sizes that divide."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jattn.llm.models import (
    DEFAULT_RULES,
    Decoder,
    DeltaNetConfig,
    FullAttentionConfig,
    LatentConfig,
    MoEConfig,
    PerLayerInputConfig,
    TensorParallel,
    logical_axes,
    parameter_shards,
    partition_specs,
    put_whole,
    shard_model,
)
from jattn.llm.models.mixers import MIXERS, STATE_CONFIGS, KimiDeltaConfig, MambaConfig
from jattn.llm.models.parts import ValueHeadConfig
from jattn.nn import MultiHeadAttention
from tests.support.devices import WHOLE, collectives, mesh, on_four_devices
from tests.support.tiny_models import tiny_config, tiny_model
from torch_core.base.errors import InvalidInput

LATENT = LatentConfig(kv_lora_rank=16, q_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24}
#: By what is special: the config's changes, and the sums over devices of its two layers and its
#: embedding. The means of a norm over all heads, of queries and of keys, are one sum more.
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "key heads of several devices, padded vocabulary": ({}, 5),
    "alibi, biases, no gate": (
        {
            "position_embedding": "alibi",
            "norm_type": "layer_norm",
            "norm_bias": True,
            "gated_mlp": False,
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        5,
    ),
    "norm over all heads": ({"qk_norm": "all", "norm_placement": "after", "num_key_value_heads": 4}, 7),
    "experts, a norm for each head, sinks": (
        {
            "moe": MoEConfig(**EXPERTS, expert_bias=True, router_bias=True, n_shared_experts=2, dense_layers=(0,)),
            "qk_norm": "per_head",
            "attention_sinks": True,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
        5,
    ),
    "latents": ({"head_dim": 4, "num_key_value_heads": 4, "latent": LATENT}, 5),
    # XLA joins the sums of the two tables; a layer's two feed-forward parts are one sum.
    "layers with other heads, keys as values, shared keys, two feed-forward parts, an input of each": (
        {
            "num_key_value_heads": 4,
            "full_attention": FullAttentionConfig(head_dim=32, num_key_value_heads=1, attention_k_eq_v=True),
            "layer_windows": (4, None, 4),
            "num_hidden_layers": 3,
            "kv_sharing_targets": (None, None, 0),
            "double_wide_mlp": True,
            "norm_placement": "both",
            "attn_output_gate": True,
            "moe": MoEConfig(**EXPERTS, with_mlp=True),
            "per_layer_input": PerLayerInputConfig(hidden_size=6, vocab_size=301, num_layers=3),
        },
        7,
    ),
    "layers with other queries and sinks, values of another size, a gate of each head": (
        {
            "full_attention": FullAttentionConfig(
                head_dim=16, num_key_value_heads=4, num_attention_heads=8, attention_sinks=True
            ),
            "layer_windows": (4, None),
            "value_head": ValueHeadConfig(head_dim=8, scale=0.7),
            "attn_head_gate": True,
            "attention_bias": True,
        },
        5,
    ),
}


def tokens_of(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 97, (2, 9)), jnp.int32)


def flat(specs: Any) -> dict[Any, PartitionSpec]:
    return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(specs)}


def dense(cut: Decoder, over: jax.sharding.Mesh, logits: PartitionSpec) -> tuple[Any, Any]:
    """The dense forward of each device's part, and its parameters."""
    graph, state = nnx.split(cut)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
    forward = jax.shard_map(
        lambda state, tokens: nnx.merge(graph, state).forward_dense(tokens),
        mesh=over,
        in_specs=(specs, WHOLE),
        out_specs=logits,
        check_vma=False,
    )
    return jax.jit(forward), state


#: Families in tests/load have its layers.
_NIGHTLY = "layers with other queries and sinks, values of another size, a gate of each head"


@pytest.mark.parametrize(
    "variant", [pytest.param(each, marks=[pytest.mark.nightly] * (each == _NIGHTLY)) for each in VARIANTS]
)
@on_four_devices
def test_a_cut_decoder_has_the_logits_of_the_whole_one_and_sums_twice_a_layer(variant: str) -> None:
    changes, sums = VARIANTS[variant]
    config, over, tokens = tiny_config(**changes), mesh("auto"), tokens_of(1)
    model = tiny_model(config, seed=0)
    forward, state = dense(shard_model(model, over), over, PartitionSpec(None, None, "tp"))

    found = np.asarray(forward(state, tokens))
    expected = np.asarray(model.forward_dense(tokens))

    np.testing.assert_allclose(found[..., : config.vocab_size], expected, rtol=0, atol=1e-5)
    assert np.isneginf(found[..., config.vocab_size :]).all()
    assert Counter(collectives(forward, state, tokens)) == {"all-reduce": sums}


@on_four_devices
def test_what_the_rules_keep_whole_is_on_every_device_and_not_summed() -> None:
    config, over, tokens = tiny_config(vocab_size=96), mesh("auto"), tokens_of(2) % 96
    model = tiny_model(config, seed=0)
    cut = shard_model(model, over, TensorParallel(size=4, rules={"vocab": None, "mlp": None}))
    forward, state = dense(cut, over, WHOLE)

    np.testing.assert_allclose(forward(state, tokens), model.forward_dense(tokens), rtol=0, atol=1e-5)
    assert collectives(forward, state, tokens) == ["all-reduce"] * 2
    assert cut.embed_tokens.embedding[...].sharding.is_fully_replicated


@on_four_devices
def test_parameters_on_a_training_mesh_are_cut_where_they_lie() -> None:
    over = mesh("auto", dp=2, tp=2)
    with pytest.raises(InvalidInput, match=r"^mesh has no axis 'model'; it has dp \(2\), tp \(2\)\. Name it: "):
        shard_model(tiny_model(tiny_config(), 0), over, TensorParallel(size=2, axis="model"))
    with pytest.raises(InvalidInput, match=r"^tensor_parallel.size is 4; mesh axis 'tp' has 2 devices\.$"):
        shard_model(tiny_model(tiny_config(), 0), over, TensorParallel(size=4))
    cut = shard_model(tiny_model(tiny_config(), 0), over)
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(nnx.state(cut))} == {over}
    with pytest.raises(InvalidInput, match=r"^model is cut already, over 2 devices; give the whole one\.$"):
        shard_model(cut, over)


def test_every_parameter_of_a_decoder_has_a_rule_and_the_large_ones_are_split() -> None:
    config = tiny_config(vocab_size=256, qk_norm="head", moe=MoEConfig(**EXPERTS, dense_layers=(0,)))
    specs = flat(partition_specs(tiny_model(config, 0)))

    whole = {str(path[-2]) for path, spec in specs.items() if not any(spec)}
    assert whole == {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "router", "norm"}
    assert specs["layers", 1, "moe", "gate_up_proj", "kernel"] == PartitionSpec("tp", None, None)
    assert specs["layers", 0, "mlp", "down_proj", "kernel"] == PartitionSpec("tp", None)


def test_flaxs_attention_splits_its_heads() -> None:
    module = MultiHeadAttention(num_heads=4, in_features=16, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0))
    specs = flat(partition_specs(nnx.state(module, nnx.Param), {**DEFAULT_RULES, "kv_heads": None}))

    assert specs["query", "kernel"] == PartitionSpec(None, "tp", None)
    assert specs["key", "bias"] == PartitionSpec(None, None)
    assert specs["out", "kernel"] == PartitionSpec("tp", None, None)


def test_a_rule_for_an_axis_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"^rules have no axis 'vocab'; they have heads\.$"):
        partition_specs(tiny_model(tiny_config(), 0), {"heads": "tp"})
    assert logical_axes(("something", "else"), 2) == (None, None)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "heads": ({"num_attention_heads": 6, "num_key_value_heads": 6}, {}, "num_attention_heads is 6; it must be"),
    "key heads": (
        {"num_attention_heads": 12, "num_key_value_heads": 6},
        {},
        "num_key_value_heads is 6 and tensor_parallel.size 4; one must be",
    ),
    "columns": (
        {"intermediate_size": 82},
        {},
        r"intermediate_size is 82; it must be a multiple of tensor_parallel.size \(4\). Keep it whole by jattn",
    ),
    "experts": (
        {"moe": MoEConfig(num_experts=6, num_experts_per_tok=2, intermediate_size=24)},
        {},
        "moe.num_experts is 6; it must be",
    ),
    "shared": (
        {"moe": MoEConfig(**EXPERTS, shared_intermediate_size=16)},
        {"mlp": None},
        "rules split one of 'mlp' and 'experts'",
    ),
    "heads of some layers": (
        {"layer_windows": (4, None), "full_attention": FullAttentionConfig(head_dim=16, num_key_value_heads=3)}
        | {"num_attention_heads": 12},
        {},
        "num_key_value_heads is 3 and tensor_parallel.size 4; one must be",
    ),
    "two feed-forward parts": (
        {"moe": MoEConfig(**EXPERTS, with_mlp=True), "norm_placement": "both"},
        {"experts": None},
        "rules split one of 'mlp' and 'experts'",
    ),
    "rules": ({}, {"embed": "tp"}, r"rules\['embed'\] is 'tp'; a decoder is cut along vocab, heads, mlp, experts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_decoder_that_cannot_be_cut_is_refused_with_the_number(case: str) -> None:
    changes, rules, message = REFUSED[case]
    with pytest.raises(InvalidInput, match=f"^{message}"):
        parameter_shards(tiny_config(**changes), TensorParallel(size=4, rules=rules))


@pytest.mark.parametrize("spec", [None, (), ("tp",)])
@on_four_devices
def test_a_hosts_array_is_copied_by_an_explicit_transfer(spec: tuple[str, ...] | None) -> None:
    place = jnp.zeros(()).sharding if spec is None else NamedSharding(mesh("auto"), PartitionSpec(*spec))
    host = np.arange(8, dtype=np.int32)

    with jax.transfer_guard("disallow"):
        put = put_whole(host, place)
    host[:] = -1

    assert put.sharding == place
    assert np.asarray(put).tolist() == list(range(8))


_MAMBA = MambaConfig(num_heads=8, head_dim=4, state_size=6, num_groups=2)
#: By kind of layer: its sizes, the columns of its products with the input, and those of a device's part of 1, 2 and 4.
INPUTS: dict[str, tuple[Any, int, tuple[int, int, int]]] = {
    "linear_attention": (DeltaNetConfig(num_heads=12, num_kv_heads=4, key_dim=4, value_dim=2), 104, (112, 64, 32)),
    "kimi_delta_attention": (KimiDeltaConfig(num_heads=4, head_dim=6), 88, (96, 64, 32)),
    "mamba": (_MAMBA, 96, (96, 48, 32)),
    # Queries, keys and values too.
    "attention_mamba": (_MAMBA, 288, (288, 144, 80)),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", INPUTS)
def test_parts_of_products_with_the_input_have_zeros_behind_up_to_a_multiple_of_16_columns(
    kind: str, size: int
) -> None:
    sizes, used, widths = INPUTS[kind]
    *_, module = MIXERS[kind]
    others = kind if kind == "attention_mamba" else "attention"
    config = tiny_config(layer_types=(kind, others), num_key_value_heads=4, **{STATE_CONFIGS[module]: sizes})
    shards = parameter_shards(config, TensorParallel(size=size))["layers", 0, module, "in_proj", "kernel"]
    width, columns = shards.cut_shape[1] // size, np.zeros((1, shards.shape[1]), int)
    columns[:, :used] = np.arange(1, used + 1)
    order = np.arange(shards.shape[1]) if shards.order is None else shards.order
    parts = np.where(order < 0, 0, columns[:, order])
    assert width == widths[(1, 2, 4).index(size)]
    assert (np.diff((parts.reshape(size, width) == 0).astype(int)) >= 0).all()
    np.testing.assert_array_equal(shards.whole(parts), columns)
