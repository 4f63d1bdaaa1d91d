"""Latent attention and the write of latents on JAX arrays, by each implementation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
import torch

import jattn
from jattn import ops
from tests.ops.runner import QUICK_COMPILE, arrays, arrays_of, keywords
from tests.support.attention_cases import assert_matches_reference, to_torch
from tests.support.latent_cases import LatentCase, latent_case, random_latent_case
from tests.support.latent_writes import rotary_write
from torch_core.base.errors import InvalidInput
from torch_core.latent.packed import unpack_latents
from torch_core.reference import write_latent_cache

each_implementation = pytest.mark.parametrize(
    "implementation", ["xla", "torch", pytest.param("triton", marks=pytest.mark.gpu)]
)


def _run(case: LatentCase, implementation: str):
    static: dict[str, Any] = {
        name: x for name, x in keywords(case.spec).items() if name not in ("attention_chunk", "use_alibi_sqrt")
    }
    limits: dict[str, Any] = {**case.limits, "max_query_len": max(1, case.limits["max_query_len"])}
    function = jax.jit(
        lambda operands, options: ops.mla_attention_with_lse(
            **operands, **options, **static, **limits, implementation=implementation
        ),
        compiler_options=QUICK_COMPILE,
    )
    return function(arrays(case), case.options)


@each_implementation
@pytest.mark.parametrize("number", range(4))
def test_a_random_problem_matches_the_reference(implementation, number):
    case = random_latent_case(number + 50)
    out, lse = _run(case, implementation)
    assert_matches_reference(case, to_torch(np.array(out)), to_torch(np.array(lse)))


@each_implementation
def test_packed_rows_are_read_as_what_they_stand_for(implementation, seed):
    case = latent_case(
        seed, seq_lens=[40, 0, 7], query_lens=[2, 0, 1], num_heads=3, kv_lora_rank=256, rope_dim=8, dtype="bfloat16",
        packed=True,
    )  # fmt: skip
    out, lse = _run(case, implementation)
    assert_matches_reference(case, to_torch(np.array(out)), to_torch(np.array(lse)))


def test_packed_rows_are_read_in_one_order_too(seed):
    case = latent_case(
        seed, seq_lens=[40, 7], query_lens=[2, 1], num_heads=3, kv_lora_rank=256, rope_dim=8, dtype="bfloat16",
        packed=True,
    )  # fmt: skip
    case.limits["batch_invariant"] = True
    out, lse = _run(case, "xla")
    assert_matches_reference(case, to_torch(np.array(out)), to_torch(np.array(lse)))


@each_implementation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("is_neox_style", [False, True])
def test_a_write_rotates_and_packs_as_the_reference_does(implementation, dtype, is_neox_style, seed):
    call = rotary_write(seed, dtype, is_neox_style=is_neox_style)
    given = arrays_of(call)
    found = jattn.write_latent_cache(**given, is_neox_style=is_neox_style, implementation=implementation)
    write_latent_cache(call)
    if implementation == "xla" and dtype == torch.uint8:
        ours, theirs = (
            unpack_latents(rows, 256, torch.float32) for rows in (to_torch(np.array(found)), call.latent_cache)
        )
        # A scale may differ in its last bit, and so a code by one.
        torch.testing.assert_close(ours, theirs, rtol=2**-3, atol=1e-6)
    else:
        assert np.array_equal(np.array(found).view(np.uint8), call.latent_cache.view(torch.uint8).numpy())


@each_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float8_e4m3fn])
def test_a_write_goes_to_its_slots_and_nowhere_else(implementation, dtype):
    kv_c, k_pe = jnp.full((3, 12), 2.0), jnp.full((3, 4), 6.0)
    cache = jnp.zeros((3, 4, 16), dtype)

    written = jattn.write_latent_cache(
        kv_c, k_pe, cache, jnp.array([11, -1, 4], jnp.int32), k_scale=2.0, implementation=implementation
    )

    expected = np.zeros((12, 16))
    expected[[4, 11]] = [1.0] * 12 + [3.0] * 4
    np.testing.assert_array_equal(np.array(written, np.float32).reshape(12, 16), expected)


def test_a_call_has_a_gradient():
    """That of query and latents, by jnp, against differences."""
    case = latent_case(3, seq_lens=[5, 3], query_lens=[2, 1], num_heads=2, kv_lora_rank=4, rope_dim=2, poison=0.0)
    given: dict[str, Any] = arrays(case)
    indices: dict[str, Any] = {name: x for name, x in given.items() if name not in ("query", "latent_cache")}

    limits: dict[str, Any] = case.limits

    def total(query, latents):
        out = jattn.mla_attention(query, latents, **indices, **limits, scale=0.4)
        return (out * jnp.arange(out.size).reshape(out.shape)).sum()

    jax.test_util.check_grads(total, (given["query"], given["latent_cache"]), order=1, modes=["rev"], rtol=2e-2)


def test_the_scale_has_no_default():
    case = latent_case(1, seq_lens=[3], query_lens=[1])
    given: Any = {**arrays(case), **case.limits}
    none: Any = None
    with pytest.raises(TypeError, match="scale"):
        jattn.mla_attention(**given)
    with pytest.raises(InvalidInput, match=r"^scale is None; give that of the plain form, \(nope_dim \+ rope_dim\)"):
        jattn.mla_attention(**given, scale=none)
