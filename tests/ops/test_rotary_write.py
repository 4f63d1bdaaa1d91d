"""Rotation and write in one call: every implementation stores and returns the reference's bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jattn import ops
from jattn.llm.models import Decoder, ModelConfig
from jattn.metadata import AttentionMetadata
from jattn.nn import PagedAttention
from tests.ops.runner import QUICK_COMPILE, arrays_of
from tests.support.attention_cases import to_torch
from tests.support.rotary_writes import quarter_turns
from tests.support.triton_ops import run_triton
from torch_core import ops as torch_ops
from torch_core import reference
from torch_core.base.errors import InvalidInput
from torch_core.metadata import SequenceRow

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn]
#: (query heads, key heads), head size, rotated elements, tokens: whole heads, part of them, tails of every tile.
SHAPES: list[dict[str, Any]] = [
    {},
    {"heads": (4, 4), "head_size": 8, "is_neox_style": False},
    {"heads": (11, 1), "head_size": 10, "rotated_dim": 6},
    {"scaled": True, "out_dtype": "float8_e4m3fn", "behind": 2},
    {"behind": 0},
    {"tokens": 515, "heads": (3, 1), "head_size": 8},
]


def _bytes(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def _assert_equals_reference(call: Any, found: Any, cache: torch.Tensor) -> None:
    expected = call.map(torch.clone)
    query = reference.rotate_and_write(expected)
    assert found.dtype == query.dtype
    assert torch.equal(found.cpu().view(torch.uint8), query.contiguous().view(torch.uint8))
    assert torch.equal(cache.cpu().view(torch.uint8), expected.kv_cache.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_gives_the_references_bits(dtype, shape, seed):
    call = quarter_turns(seed, dtype, **shape, k_scale=0.5 if dtype == torch.float8_e4m3fn else None)
    given = call.map(torch.clone)

    _assert_equals_reference(call, run_triton(given)["out"], given.kv_cache)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, {"tokens": 700, "heads": (32, 8), "head_size": 128, "rotated_dim": 128}])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_launch_from_torch_gives_the_references_bits(dtype, shape, seed):
    call = quarter_turns(seed, dtype, **shape)
    given = call.map(torch.Tensor.cuda)

    _assert_equals_reference(call, torch_ops.run(given)["out"], given.kv_cache)


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_torch_gives_the_references_bits(dtype, shape, seed):
    call = quarter_turns(seed, dtype, **shape)
    given = call.map(torch.clone)

    _assert_equals_reference(call, torch_ops.run(given)["out"], given.kv_cache)


@pytest.mark.parametrize("implementation", ["xla", "torch", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_a_program_gives_the_references_bits(implementation, dtype, shape, seed):
    call = quarter_turns(seed, dtype, **shape)
    given: dict[str, Any] = arrays_of(call)
    options: dict[str, Any] = {name: getattr(call, name) for name in ("is_neox_style", "out_dtype", "num_query_heads")}
    write = jax.jit(
        lambda given: ops.rotate_and_write(**given, **options, implementation=implementation),
        compiler_options=QUICK_COMPILE,
    )

    query, cache = write(given)

    _assert_equals_reference(call, to_torch(np.array(query)), to_torch(np.array(cache)))


@pytest.mark.gpu
def test_real_angles_give_one_set_of_bits_from_torch_and_from_jax(seed):
    call = quarter_turns(seed, heads=(32, 8), head_size=128, rotated_dim=64, tokens=33)
    angles = torch.rand(33, 32, generator=torch.Generator().manual_seed(seed)) * 6
    call = call.with_arrays({"cos_sin": torch.cat([angles.cos(), angles.sin()], dim=1)})
    on_device = call.map(torch.Tensor.cuda)
    theirs = torch_ops.run(on_device)["out"]
    given: dict[str, Any] = arrays_of(call)

    query, cache = jax.jit(lambda given: ops.rotate_and_write(**given, implementation="triton"))(given)

    assert np.array_equal(_bytes(query), theirs.cpu().view(torch.uint8).numpy())
    assert np.array_equal(_bytes(cache), on_device.kv_cache.cpu().view(torch.uint8).numpy())


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_decoder_computes_the_same_by_one_launch_and_by_several(share, monkeypatch, seed):
    config = ModelConfig(
        vocab_size=11, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, partial_rotary_factor=share, dtype="float32",
    )  # fmt: skip
    model = Decoder(config, rngs=nnx.Rngs(seed))
    metadata = AttentionMetadata.build([SequenceRow([1, 2], 2, 3), SequenceRow([3], 0, 2)], block_size=4, num_blocks=4)
    caches = tuple(jnp.full((4, 2, 4, 2, 8), 0.5) for _ in range(2))
    inputs = (jnp.array([1, 2, 3, 4, 5]), jnp.array([2, 3, 4, 0, 1]), caches, metadata)
    several = model(*inputs)
    calls = []
    monkeypatch.setattr(PagedAttention, "rotates_in_one_launch", property(lambda core: calls.append(core) or True))

    once = model(*inputs)

    assert len(calls) == 2
    for ours, theirs in zip(jax.tree.leaves(once), jax.tree.leaves(several), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_flow_through_rotation_and_write(seed):
    call = quarter_turns(seed, torch.float32)
    given: dict[str, Any] = arrays_of(call.map(torch.nan_to_num))
    given["qkv"] = given["qkv"].astype(jnp.float32)

    def total(qkv: jax.Array) -> jax.Array:
        query, cache = ops.rotate_and_write(**{**given, "qkv": qkv})
        return (query**2).sum() + (cache**2).sum()

    # Turns keep lengths: the gradient is twice what is returned or stored.
    stored = np.repeat([1.0, 0.0, 1.0, 1.0, 0.0], 4).reshape(5, 4, 1)
    kept = np.concatenate([np.ones((5, 5, 1)), stored], axis=1)
    np.testing.assert_allclose(jax.grad(total)(given["qkv"]), 2 * np.array(given["qkv"]) * kept, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(5, 4, 12)}, "qkv has 4 heads and kv_cache 2; qkv must have those of keys and of values, "),
        ({"cos_sin": torch.zeros(5, 7)}, "cos_sin has 7 columns; it must have a cosine and a sine for each rotated"),
        ({"cos_sin": torch.zeros(5, 14)}, "cos_sin has 14 columns; it must have .* of the 12 elements of a head"),
        ({"cos_sin": torch.zeros(4, 8)}, "qkv has 5 rows; there are 4 tokens, those of cos_sin"),
        ({"slot_mapping": torch.zeros(6).int()}, "slot_mapping has 6 entries and qkv 5 tokens; give at most one slot"),
        (
            {"slot_mapping": torch.tensor([20]).int()},
            "slot_mapping.0. is 20; a cache of 5 blocks of 4 has slots 0 to 19",
        ),
        ({"num_query_heads": 6}, "num_query_heads is 6; it must be from 1 to 5"),
        ({"out": torch.zeros(5, 4, 12)}, "out is float32.5, 4, 12.; it must be bfloat16.5, 5, 12."),
    ],
)
def test_what_does_not_fit_is_refused(change, message, seed):
    call = dataclasses.replace(quarter_turns(seed), **change)
    with pytest.raises(InvalidInput, match=message):
        torch_ops.run(call)
