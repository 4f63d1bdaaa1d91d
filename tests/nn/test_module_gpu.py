"""The module on a CUDA device, by the kernels that it takes there by default."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.nn import MultiHeadAttention, attention_fn

pytestmark = pytest.mark.gpu

BATCH, LENGTH, FEATURES = 3, 70, 256
# Of 16-bit products and of TF32, relative to the largest output.
TOLERANCES = {"float32": 5e-3, "bfloat16": 3e-2, "float16": 5e-3}


def inputs(seed: int, dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(BATCH, LENGTH, FEATURES)), dtype)


def apart(one: Any, other: Any) -> float:
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(np.abs(one - other).max() / np.abs(other).max())


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9, "logits_soft_cap": 4.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_decode_in_pieces_gives_what_jnp_training_gives(dtype: str, options: dict[str, Any], seed: int) -> None:
    options = {"num_kv_heads": 2, "dtype": dtype, "param_dtype": dtype, "decode": False, **options}
    module = MultiHeadAttention(4, FEATURES, **options, rngs=nnx.Rngs(0))
    plain = MultiHeadAttention(4, FEATURES, **options, implementation="xla", rngs=nnx.Rngs(0))
    x = inputs(seed, dtype)
    expected = plain(x, is_causal=True)
    assert apart(module(x, is_causal=True), expected) <= TOLERANCES[dtype]
    module.init_cache((BATCH, 80, FEATURES))
    step = nnx.jit(lambda module, x: module(x, decode=True))
    pieces = [step(module, x[:, a:b]) for a, b in ((0, 40), (40, 69), (69, 70))]
    assert apart(jnp.concatenate(pieces, 1), expected) <= TOLERANCES[dtype]
    assert np.isnan(step(module, x[:, :20])).all()


def test_padding_becomes_lengths_for_the_kernels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    query, key, value = (jnp.asarray(rng.normal(size=(BATCH, LENGTH, 4, 64)), jnp.bfloat16) for _ in range(3))
    real = rng.random((BATCH, LENGTH)) < 0.7
    key = jnp.where(real[..., None, None], key, jnp.nan)
    found = attention_fn(query, key, value, mask=jnp.asarray(real)[:, None, None], implementation="triton")
    key = jnp.where(real[..., None, None], key, 0)
    expected = attention_fn(query, key, value, mask=jnp.asarray(real)[:, None, None], implementation="xla")
    assert apart(found, expected) <= TOLERANCES["bfloat16"]


def test_a_mask_that_no_kernel_takes_is_computed_in_jnp(seed: int) -> None:
    x = inputs(seed, "float32").reshape(BATCH, LENGTH, 4, 64)
    mask = jnp.asarray(np.random.default_rng(seed).random((BATCH, 1, LENGTH, LENGTH)) < 0.7)
    assert apart(attention_fn(x, x, x, mask=mask), nnx.dot_product_attention(x, x, x, mask=mask)) <= 5e-3


# T19 of the traps that users meet: torch and JAX bring CUDA libraries of their own.
@pytest.mark.parametrize("imports", ["import torch, jax", "import jax, torch"])
def test_either_library_may_be_imported_first(imports: str) -> None:
    code = f"""
{imports}
import jax.numpy as jnp
from jattn.nn import attention_fn
ones = jnp.ones((1, 8, 2, 64), jnp.bfloat16)
a = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
assert float((a @ a).sum()) == 64**3 and float((ones[0, :, 0] @ ones[0, :, 0].T).sum()) == 8 * 8 * 64
assert (attention_fn(ones, ones, ones, is_causal=True) == 1).all()
"""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environment)
