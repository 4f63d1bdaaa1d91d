"""RMSNorm and LayerNorm: those of flax, and rows whose bits do not depend on their number."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.llm.models import set_batch_invariant
from jattn.nn import LayerNorm, RMSNorm
from jattn.nn.norms import normalised
from torch_core.base.errors import Unsupported

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "rms": (RMSNorm, nnx.RMSNorm, {}),
    "rms without a scale": (RMSNorm, nnx.RMSNorm, {"use_scale": False}),
    "layer": (LayerNorm, nnx.LayerNorm, {"epsilon": 1e-3}),
    "layer in bfloat16": (LayerNorm, nnx.LayerNorm, {"dtype": jnp.bfloat16, "use_bias": False}),
    "layer with a bias alone": (LayerNorm, nnx.LayerNorm, {"use_scale": False}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_is_that_of_flax_and_its_rows_are_independent_when_switched(kind, seed):
    own, theirs, options = KINDS[kind]
    norm, flax = own(24, **options, rngs=nnx.Rngs(seed)), theirs(24, **options, rngs=nnx.Rngs(seed))
    for name in ("scale", "bias"):
        if getattr(norm, name, None) is not None:
            key = jax.random.key(seed)
            getattr(norm, name)[...] = getattr(flax, name)[...] = jax.random.normal(key, (24,))
    x = 3 * jax.random.normal(jax.random.key(seed), (2, 7, 24)) + 1
    np.testing.assert_array_equal(norm(x), flax(x))

    set_batch_invariant(norm)
    found = jax.jit(norm)(x)
    assert found.dtype == flax(x).dtype
    spacing = 2.0 ** (-7 if found.dtype == jnp.bfloat16 else -20)
    np.testing.assert_allclose(found.astype(jnp.float32), flax(x).astype(jnp.float32), rtol=spacing, atol=spacing)
    np.testing.assert_array_equal(jax.jit(norm)(x[1, 2:3]), found[1, 2:3])
    few = x[0, :1].astype(jnp.bfloat16)
    for rows in (few, few[:0]):
        assert (norm(rows).shape, norm(rows).dtype) == (rows.shape, flax(rows).dtype)


def test_a_mask_and_other_axes_are_refused_when_switched():
    norm, wide = LayerNorm(4, rngs=nnx.Rngs(0)), RMSNorm(4, reduction_axes=(-2, -1), rngs=nnx.Rngs(0))
    for each in (norm, wide):
        set_batch_invariant(each)
    with pytest.raises(Unsupported, match=r"^mask is given and batch_invariant is True; a row is the last axis"):
        norm(jnp.ones((2, 4)), mask=jnp.ones((2, 4), bool))
    with pytest.raises(Unsupported, match=r"^reduction_axes is given and batch_invariant is True"):
        wide(jnp.ones((2, 4)))
    with pytest.raises(Unsupported, match=r"is a LayerNorm, .*; use jattn\.nn\.LayerNorm"):
        set_batch_invariant(nnx.Dict({"a": nnx.LayerNorm(4, rngs=nnx.Rngs(0))}))


@pytest.mark.parametrize(
    "dtypes", [("float64", "float32", "float32"), ("float32", "float64", "float32"), (None, "float32", "float64")]
)
def test_a_norm_by_one_kernel_is_as_wide_as_flaxs(dtypes, seed):
    dtype, param_dtype, x_dtype = dtypes
    with jax.enable_x64(True):
        norm = nnx.RMSNorm(24, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(seed))
        x = jax.random.normal(jax.random.key(seed), (5, 24), x_dtype)
        found, wanted = normalised(norm, x), norm(x)
        assert found.dtype == wanted.dtype
        eps = float(jnp.finfo(found.dtype).eps)
        np.testing.assert_allclose(found, wanted, rtol=4 * eps, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_norm_by_one_kernel_mixes_no_dtypes_where_its_own_is_named(dtype):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        norm = nnx.RMSNorm(24, dtype=dtype, param_dtype="bfloat16", rngs=nnx.Rngs(0))

        assert normalised(norm, jnp.ones((5, 24), "float32")).dtype == dtype
