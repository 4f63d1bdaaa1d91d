"""Low-rank adapters of decoders and of `jattn.nn`: several in a batch, and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.llm.models import Adapters, Fp8Linear, MoEConfig, adapter_targets, quantize_fp8
from jattn.nn import LoRA
from tests.support.lora_models import matrices, merged_model, tiny_adapters
from tests.support.tiny_models import tiny_config, tiny_model

TOKENS = jnp.arange(1, 19, dtype=jnp.int32).reshape(3, 6)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "gated_mlp": False, "mlp_bias": True},
        {"num_key_value_heads": 1, "num_hidden_layers": 2, "kv_sharing_targets": (None, 0)},
    ],
    ids=str,
)
def test_each_row_has_the_logits_of_its_merged_model(changes, seed):
    config = tiny_config(**{"num_hidden_layers": 1, **changes})
    model, adapters = tiny_model(config, seed), tiny_adapters(config, seed, alpha=6.0)
    found = model.forward_dense(TOKENS, adapters=adapters.batch(jnp.array([1, -1, 0]), 6))
    merged = [merged_model(model, adapters, 1), model, merged_model(model, adapters, 0)]
    logits = jnp.stack([each.forward_dense(TOKENS)[row] for row, each in enumerate(merged)])
    np.testing.assert_allclose(jax.nn.log_softmax(found), jax.nn.log_softmax(logits), atol=1e-5)


def test_a_batch_of_several_adapters_has_the_gradients_of_batches_of_one(seed):
    config = tiny_config(num_hidden_layers=1)
    model, adapters = tiny_model(config, seed), tiny_adapters(config, seed, num_adapters=3)

    @nnx.jit
    def gradients(adapters, ids):
        def loss(adapters):
            logits = model.forward_dense(TOKENS, adapters=adapters.batch(ids, 6))
            return jnp.where(ids[:, None, None] >= 0, jax.nn.log_softmax(logits), 0)[..., 5].sum()

        return nnx.to_pure_dict(nnx.state(nnx.grad(loss)(adapters)))

    together = gradients(adapters, jnp.array([2, 0, 2]))
    apart = [gradients(adapters, jnp.array(ids)) for ids in ([2, -1, -1], [-1, 0, -1], [-1, -1, 2])]
    summed = jax.tree.map(lambda *each: sum(each), *apart)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-5), together, summed)
    assert max(abs(leaf[1]).max() for leaf in jax.tree.leaves(together)) == 0
    assert min(abs(leaf[0]).max() for leaf in jax.tree.leaves(together)) > 0


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
    found = model.forward_dense(TOKENS, adapters=adapters.batch(jnp.ones(3, jnp.int32), 6))
    for (layer, path), ((first, second),) in matrices(adapters, 1).items():
        module, name = path.split(".")
        parent = getattr(model.layers[layer], module)
        assert isinstance(getattr(parent, name), Fp8Linear)
        setattr(parent, name, Plus(getattr(parent, name), (second @ first).T))
    np.testing.assert_allclose(found, model.forward_dense(TOKENS), rtol=1e-4, atol=1e-4)


def test_targets_are_chosen_by_the_last_parts_of_their_names(seed):
    adapters = Adapters(tiny_config(), rank=2, target_modules=("o_proj", "mlp.down_proj"), rngs=nnx.Rngs(seed))
    assert [sorted(layer) for layer in adapters.layers] == [["mlp.down_proj", "self_attn.o_proj"]] * 2


def test_an_unknown_target_is_refused():
    with pytest.raises(jattn.InvalidInput, match="target_modules has 'lm_head'; this model has mlp"):
        Adapters(tiny_config(), rank=2, target_modules=("lm_head",), rngs=nnx.Rngs(0))


def test_experts_and_routers_are_no_targets():
    moe = MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=16, n_shared_experts=1)
    names = {target.module for target in adapter_targets(tiny_config(moe=moe))}
    attention = {"self_attn.o_proj", "self_attn.qkv_proj"}
    assert names == attention | {"moe.shared_expert.down_proj", "moe.shared_expert.gate_up_proj"}


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
