"""Low-rank adapters of decoders and of `jattn.nn`: several in a batch, and their gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.llm.models import Adapters, Fp8Linear, MoEConfig, adapter_targets, chosen_targets, quantize_fp8
from jattn.llm.models.batch_adapters import BatchAdapters, LoraWeights, attached
from jattn.llm.models.latent import with_split_expansions
from jattn.llm.models.mixers import MambaConfig
from jattn.llm.models.quantized import dequantize, quantized_linear
from jattn.metadata import AttentionMetadata
from jattn.nn import LoRA
from tests.support.lora_models import GATED, LATENT, STATES, matrices, merged_model, tiny_adapters
from tests.support.tiny_models import tiny_config, tiny_model

TOKENS = jnp.arange(1, 19, dtype=jnp.int32).reshape(3, 6)
# Of three adapters the second has no row.
IDS = np.array([2, 0, 2])


@nnx.jit
def logits_of(model, tokens, adapters=None):
    return model.forward_dense(tokens, adapters=adapters)


MOE = MoEConfig(num_experts=3, num_experts_per_tok=2, intermediate_size=8, n_shared_experts=1)
# What an adapter may change in a model with experts.
ALL = ("qkv_proj", "o_proj", "moe.gate_up_proj", "moe.down_proj", "shared_expert.down_proj", "embed_tokens", "lm_head")


@pytest.mark.parametrize(
    ("changes", "targets"),
    [
        (
            {"attention_bias": True, "gated_mlp": False, "mlp_bias": True, "num_key_value_heads": 1}
            | {"num_hidden_layers": 2, "kv_sharing_targets": (None, 0)},
            ("qkv_proj", "o_proj", "up_proj", "down_proj", "lm_head"),
        ),
        ({"moe": MOE, "tie_word_embeddings": True, "embedding_multiplier": 3.0}, ALL),
        pytest.param(
            {"moe": replace(MOE, apply_router_weight_on_input=True, num_experts=40)},
            ("moe.gate_up_proj", "moe.down_proj"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(GATED, None, marks=pytest.mark.nightly),
        pytest.param(LATENT, None, marks=pytest.mark.nightly),
        pytest.param(STATES, None, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_each_row_has_the_logits_of_its_merged_model(changes, targets, seed):
    config = tiny_config(**{"num_hidden_layers": 1, **changes})
    model = tiny_model(config, seed)
    targets = targets or {target.module for target in adapter_targets(config)}
    adapters = tiny_adapters(config, seed, alpha=6.0, target_modules=[*targets])
    found = logits_of(model, TOKENS, adapters.batch(jnp.array([1, -1, 0]), 6))
    merged = [merged_model(model, adapters, index) for index in (1, 0)]
    rows = [logits_of(each, TOKENS[row][None])[0] for row, each in zip((0, 2), merged, strict=True)]
    logits = jnp.stack([rows[0], logits_of(model, TOKENS[1:2])[0], rows[1]])
    np.testing.assert_allclose(jax.nn.log_softmax(found), jax.nn.log_softmax(logits), atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_a_routers_logits_have_the_digits_of_float32_with_an_adapter(num_rows):
    layer = tiny_model(tiny_config(num_hidden_layers=1, moe=MOE, dtype="bfloat16"), 0).layers[0]
    layer.moe.router.kernel[...] = jnp.zeros_like(layer.moe.router.kernel[...])
    # 257 is not a bfloat16.
    second = jnp.tile(jnp.array([256, 1], jnp.bfloat16), (1, MOE.num_experts, 1))
    weights = LoraWeights(jnp.eye(2, layer.config.hidden_size, dtype=jnp.bfloat16)[None], second)
    adapters = BatchAdapters.of(({"moe.router": weights},), {}, jnp.zeros(num_rows, jnp.int32), 1)
    x = jnp.ones((num_rows, layer.config.hidden_size), jnp.bfloat16)
    assert (attached(layer, adapters.of_layer(0)).moe.router(x) == 257).all()


# 64 rows, up to 256, and more: products are added in other places.
@pytest.mark.parametrize("length", [16, 22, 90])
def test_many_rows_have_the_logits_of_their_merged_models(length, seed):
    config = tiny_config(num_hidden_layers=1)
    model = tiny_model(config, seed)
    adapters = tiny_adapters(config, seed, target_modules=["qkv_proj", "gate_up_proj", "down_proj"])
    tokens = jnp.arange(4 * length, dtype=jnp.int32).reshape(4, length) % config.vocab_size
    found = logits_of(model, tokens, adapters.batch(jnp.array([1, -1, 0, -1]), length))
    models = [merged_model(model, adapters, 1), model, merged_model(model, adapters, 0), model]
    wanted = jnp.stack([logits_of(each, row[None])[0] for each, row in zip(models, tokens, strict=True)])
    np.testing.assert_allclose(jax.nn.log_softmax(found), jax.nn.log_softmax(wanted), atol=1e-5)


def test_latents_that_are_attended_in_the_absorbed_form_have_the_plain_forms_adapters(seed):
    config = tiny_config(**LATENT)
    model, batch = tiny_model(config, seed), tiny_adapters(config, seed).batch(jnp.array([1, -1]), 4)
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(2, 4, config.hidden_size)), jnp.float32)
    tables = jnp.array([[0], [1]], jnp.int32)
    metadata = AttentionMetadata(
        block_tables=tables, seq_lens=jnp.full(2, 4, jnp.int32), query_start_loc=jnp.array([0, 4, 8], jnp.int32),
        slot_mapping=jnp.arange(8, dtype=jnp.int32), max_query_len=4,
    )  # fmt: skip

    @nnx.jit
    def both(layer):
        layer = attached(layer, batch.of_layer(0)).self_attn
        absorbed, _ = layer.forward_paged(x.reshape(8, -1), None, jnp.full((2, 4, 20), jnp.nan), metadata)
        return absorbed.whole().reshape(x.shape), layer.forward_dense(x, None).whole()

    absorbed, plain = both(model.layers[0])
    np.testing.assert_allclose(absorbed, plain, atol=1e-5)
    # As an engine has the layer.
    split: Any = with_split_expansions(model)
    for found in both(split.layers[0]):
        np.testing.assert_allclose(found, plain, atol=1e-5)


@pytest.mark.nightly
def test_a_batch_of_several_adapters_has_the_gradients_of_merged_models(seed):
    config = tiny_config(num_hidden_layers=1, moe=MOE, tie_word_embeddings=True)
    model = tiny_model(config, seed)
    adapters = tiny_adapters(config, seed, num_adapters=3, target_modules=ALL)

    def loss(logits):
        return jax.nn.log_softmax(logits)[..., 5].sum()

    @nnx.jit
    def together(adapters):
        return nnx.grad(lambda each: loss(model.forward_dense(TOKENS, adapters=each.batch(IDS, 6))))(adapters)

    @nnx.jit
    def merged(adapters, index, tokens):
        return nnx.grad(lambda each: loss(merged_model(model, each, index, jnp).forward_dense(tokens[None])))(adapters)

    rows = [merged(adapters, index, tokens) for index, tokens in zip(IDS, TOKENS, strict=True)]
    found, *each = (nnx.to_pure_dict(nnx.state(gradients)) for gradients in (together(adapters), *rows))
    wanted = jax.tree.map(lambda *each: sum(each), *each)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-5 * abs(y).max()), found, wanted)
    assert max(abs(leaf[1]).max() for leaf in jax.tree.leaves(found)) == 0
    assert min(abs(leaf[0]).max() for leaf in jax.tree.leaves(found)) > 0


class Plus(nnx.Module):
    """A linear layer and a matrix that is added to its own."""

    def __init__(self, base: nnx.Module, added: np.ndarray) -> None:
        self.base, self.added = base, nnx.Param(jnp.asarray(added, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.base(x) + x @ self.added[...]


def test_kernels_in_8_bits_have_adapters_in_16_bits_beside_them(seed):
    config = tiny_config(num_hidden_layers=1)
    model, adapters = tiny_model(config, seed), tiny_adapters(config, seed, target_modules=("o_proj", "down_proj"))
    quantize_fp8(model)
    found = logits_of(model, TOKENS, adapters.batch(jnp.ones(3, jnp.int32), 6))
    for target, ((first, second),) in matrices(adapters, 1).items():
        module, name = target.module.split(".")
        parent = getattr(model.layers[0], module)
        assert isinstance(getattr(parent, name), Fp8Linear)
        setattr(parent, name, Plus(getattr(parent, name), (second @ first).T))
    np.testing.assert_allclose(found, logits_of(model, TOKENS), rtol=1e-4, atol=1e-4)


def parts_of_bits(bits: str, shape: tuple[int, ...], seed: int) -> tuple[jax.Array, jax.Array]:
    """A random kernel [..., in, out] as it is stored, and its scales; of 4 bits there are two groups of inputs."""
    generator = np.random.default_rng(seed)
    *front, inputs, outputs = shape
    if bits == "e4m3":
        kernel = jnp.asarray(generator.normal(size=shape), jnp.float8_e4m3fn)
        return kernel, jnp.asarray(generator.uniform(0.1, 0.3, (*front, 1, outputs)), jnp.float32)
    kernel = jnp.asarray(generator.integers(0, 256, (*front, inputs // 2, outputs)), jnp.uint8)
    scales = generator.uniform(0.02, 0.05, (*front, 2, outputs))
    return kernel, jnp.asarray(np.concatenate([scales, np.full_like(scales, 8)], axis=-2), jnp.float32)


@pytest.mark.parametrize("bits", ["int4", pytest.param("e4m3", marks=pytest.mark.nightly)])
def test_kept_bases_have_the_tokens_of_widened_ones_with_the_same_adapters(bits, seed):
    config = tiny_config(
        num_hidden_layers=1, hidden_size=64, moe=replace(MOE, n_shared_experts=0, intermediate_size=64)
    )
    kept, widened = (tiny_model(config, seed) for _ in range(2))
    adapters = tiny_adapters(config, seed, num_adapters=3)
    for number, target in enumerate(target for target in adapter_targets(config) if target.layer is not None):
        parent, name = target.module.split(".")
        of_kept, of_widened = (getattr(model.layers[0], parent) for model in (kept, widened))
        old = getattr(of_widened, name)
        parts = parts_of_bits(bits, old.kernel.shape, seed + number)
        setattr(of_kept, name, quantized_linear(old, parts, None)[0])
        old.kernel[...] = dequantize(*parts).astype(old.kernel.dtype)
    found, wanted = (logits_of(each, TOKENS, adapters.batch(jnp.array(IDS), 6)) for each in (kept, widened))
    assert (found.argmax(-1) == wanted.argmax(-1)).all()
    np.testing.assert_allclose(jax.nn.log_softmax(found), jax.nn.log_softmax(wanted), atol=1e-5)
    assert (logits_of(kept, TOKENS).argmax(-1) != found.argmax(-1)).any()


def test_targets_are_chosen_by_the_last_parts_of_their_names(seed):
    adapters = Adapters(tiny_config(), rank=2, target_modules=("o_proj", "mlp.down_proj"), rngs=nnx.Rngs(seed))
    assert [sorted(layer) for layer in adapters.layers] == [["mlp.down_proj", "self_attn.o_proj"]] * 2


@pytest.mark.parametrize("name", ["in_proj_qkvz", "linear_attn.in_proj_ba", "in_proj"])
def test_names_of_parts_of_the_delta_rules_input_product_are_those_of_the_product(name):
    config = tiny_config(**GATED)
    assert [target.module for target in chosen_targets(config, (name,))] == ["linear_attn.in_proj"]


@pytest.mark.parametrize("name", ["qkv_proj", "self_attn.qkv_proj", "mamba.in_proj"])
def test_queries_keys_and_values_are_a_target_where_they_share_mambas_product(name):
    sizes = MambaConfig(num_heads=4, head_dim=6, state_size=8)
    config = tiny_config(layer_types=("attention_mamba",) * 2, mamba=sizes)
    assert [target.slices for target in chosen_targets(config, (name,))] == [(64, 32, 32, 80)] * 2
    apart = tiny_config(layer_types=("attention", "mamba"), mamba=sizes)
    assert len(chosen_targets(apart, (name,))) == 1


def test_an_unknown_target_is_refused():
    with pytest.raises(jattn.InvalidInput, match="target_modules has 'router'; this model has embed"):
        Adapters(tiny_config(), rank=2, target_modules=("router",), rngs=nnx.Rngs(0))


def test_routers_are_targets_by_name_alone_and_experts_are_one_by_one():
    config = tiny_config(moe=MOE)
    targets = {target.module: target for target in adapter_targets(config)}
    shared = {f"moe.shared_expert.{name}" for name in ("down_proj", "gate_up_proj")}
    layers = {"moe.down_proj", "moe.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj"} | shared
    assert targets.keys() == layers | {"embed_tokens", "lm_head", "moe.router"}
    assert {target.module for target in chosen_targets(config, None)} == layers
    assert targets["moe.gate_up_proj"].shapes(2) == ((3, 4, 48), (3, 16, 2))


def test_the_projections_of_a_layer_take_trainable_adapters(seed):
    layer = jattn.MultiHeadAttention(num_heads=2, in_features=8, rngs=nnx.Rngs(seed), decode=False)
    x = jax.random.normal(jax.random.key(seed), (2, 5, 8))
    plain = layer(x)
    for name in ("query", "value", "out"):
        setattr(layer, name, LoRA(getattr(layer, name), rank=2, alpha=4.0, rngs=nnx.Rngs(seed)))
    assert (layer(x) == plain).all()
    wrt = nnx.DiffState(0, nnx.LoRAParam)
    gradients = nnx.grad(lambda layer: jnp.sin(layer(x)).sum(), argnums=wrt)(layer)
    assert sorted(gradients) == ["out", "query", "value"]
    graph, trained, frozen = nnx.split(layer, nnx.LoRAParam, ...)
    stepped = nnx.merge(graph, jax.tree.map(lambda w, g: w - 0.1 * g, trained, gradients), frozen)
    assert (stepped(x) != plain).any()


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nnx.Embed(3, 4, rngs=nnx.Rngs(0)), "base_module is a Embed; it must be an nnx.Linear"),
        (nnx.LinearGeneral(4, 3, axis=0, rngs=nnx.Rngs(0)), r"has inputs along the axes \(0,\)"),
    ],
)
def test_other_modules_have_no_adapter(module, text):
    with pytest.raises(jattn.InvalidInput, match=text):
        LoRA(module, rank=1, rngs=nnx.Rngs(0))
