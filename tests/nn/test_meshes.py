"""The module under `jax.set_mesh`: partitioned by flax's annotations, on Auto and on Explicit axes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jattn.nn import (
    DeepSeekRoPE,
    GatedDeltaNet,
    KimiDeltaAttention,
    LightningAttention,
    Mamba2,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    ShortConv,
)
from tests.support.devices import mesh, on_four_devices

# T9: a spec is no tuple any more; flax takes both.
METADATA: dict[str, dict[str, Any]] = {
    "kernel_metadata": {"out_sharding": (None, "tensor", None)},
    "out_kernel_metadata": {"out_sharding": P("tensor", None, None)},
    "bias_metadata": {"out_sharding": ("tensor", None)},
    "out_bias_metadata": {"out_sharding": (None,)},
}
LOGICAL = {
    **METADATA,
    "kernel_metadata": {"out_sharding": (None, "heads", None), "sharding_rules": (("heads", "tensor"),)},
}


def build(metadata: dict[str, Any]) -> MultiHeadAttention:
    return MultiHeadAttention(4, 16, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0), **metadata)


def inputs() -> Any:
    return np.random.default_rng(0).normal(size=(4, 6, 16)).astype(np.float32)


def spec_of(array: Any) -> Any:
    return array.sharding.spec


# T7 and T8: jax.set_mesh, and outputs that keep what the caller's arrays had.
@pytest.mark.parametrize(("kind", "metadata"), [("auto", "logical axes"), ("explicit", "mesh axes")])
@on_four_devices
def test_training_is_partitioned_by_batch_and_heads(kind: str, metadata: str) -> None:
    expected_module = build({})
    loss = nnx.grad(lambda module, x: (module(x, is_causal=True) ** 2).sum())
    expected, expected_gradient = expected_module(inputs(), is_causal=True), loss(expected_module, inputs())
    grid = mesh(kind, data=2, tensor=2)
    with jax.set_mesh(grid):
        module = build(METADATA if metadata == "mesh axes" else LOGICAL)
        assert spec_of(module.query.kernel.get_value())[1] == "tensor"
        shardings = {} if kind == "auto" else {"out_sharding": P("data"), "qkv_sharding": P("data", None, "tensor")}

        @nnx.jit
        def step(module: Any, x: Any) -> Any:
            def loss(module: Any) -> Any:
                y = module(x, is_causal=True, **shardings)
                return (y**2).sum(), y

            gradient, y = nnx.grad(loss, has_aux=True)(module)
            return y, gradient

        y, gradient = step(module, jax.device_put(inputs(), NamedSharding(grid, P("data"))))
    assert spec_of(y)[0] == "data"
    assert np.allclose(y, expected, atol=1e-5)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        assert spec_of(one) == () or "tensor" in spec_of(one) or one.ndim == 1
        assert np.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@on_four_devices
def test_a_held_cache_is_split_over_heads_and_stays_so(kind: str) -> None:
    expected = build({})(inputs(), is_causal=True)
    grid = mesh(kind, tensor=2, data=2)
    with jax.set_mesh(grid):
        module = build(METADATA)
        module.init_cache((4, 8, 16), block_size=4, out_sharding=(None, None, "tensor", None))
        shardings = {} if kind == "auto" else {"out_sharding": P(), "qkv_sharding": P(None, None, "tensor")}
        step = nnx.jit(lambda module, x: module(x, decode=True, **shardings))
        x = jax.device_put(inputs(), NamedSharding(grid, P()))
        y = [step(module, x[:, :5]), step(module, x[:, 5:])]
        assert module.cached_key is not None
        assert spec_of(module.cached_key.get_value())[2] == "tensor"
    assert np.allclose(jnp.concatenate(list(map(np.asarray, y)), 1), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@on_four_devices
def test_latent_attention_trains_on_a_batch_that_is_split(kind: str) -> None:
    sizes: dict[str, Any] = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    module = MultiHeadLatentAttention(2, 16, **sizes, rope=DeepSeekRoPE(dim=4), rngs=nnx.Rngs(0))
    graph, params = nnx.split(module)

    @jax.jit
    @jax.value_and_grad
    def loss(params: Any, x: Any) -> Any:
        return (nnx.merge(graph, params)(x) ** 2).sum()

    expected = loss(params, inputs())
    grid = mesh(kind, data=4)
    with jax.set_mesh(grid):
        whole = jax.device_put(params, NamedSharding(grid, P()))
        found = loss(whole, jax.device_put(inputs(), NamedSharding(grid, P("data"))))
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    assert all(np.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)


LAYERS: dict[str, Any] = {
    "delta rule": functools.partial(GatedDeltaNet, 4, 16, num_kv_heads=2, key_dim=8, value_dim=6),
    "channels": functools.partial(KimiDeltaAttention, 4, 16, head_dim=8),
    "lightning": functools.partial(LightningAttention, 4, 16, head_dim=8),
    "mamba": functools.partial(Mamba2, 4, 16, head_dim=8, state_size=8, num_groups=2),
    "convolution": functools.partial(ShortConv, 16),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("way", ["auto xla", "explicit xla", "explicit torch", "auto shard_map"])
@on_four_devices
def test_a_layer_with_a_state_trains_on_a_split_batch(way: str, name: str) -> None:
    kind, how = way.split()
    implementation = "torch" if how == "torch" else "xla"
    graph, weights = nnx.split(LAYERS[name](implementation=implementation, rngs=nnx.Rngs(0)))

    def layer(weights: Any, x: Any) -> Any:
        return nnx.merge(graph, weights)(x)

    expected = jax.jit(jax.grad(lambda weights: (layer(weights, inputs()) ** 2).sum()))(weights)
    grid = mesh(kind, data=4)
    with jax.set_mesh(grid):
        mapped = jax.shard_map(layer, in_specs=(P(), P("data")), out_specs=P("data")) if how == "shard_map" else layer
        whole = jax.device_put(weights, NamedSharding(grid, P()))
        x = jax.device_put(inputs(), NamedSharding(grid, P("data")))
        found = jax.jit(jax.grad(lambda weights, x: (mapped(weights, x) ** 2).sum()))(whole, x)
    jax.tree.map(lambda each, other: np.testing.assert_allclose(each, other, rtol=1e-5, atol=1e-5), found, expected)
