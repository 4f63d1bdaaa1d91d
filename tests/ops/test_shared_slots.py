"""Layers with a state: sequences without tokens, as those of padding, may name a slot that another sequence holds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from jattn import ops
from tests.support.conv_cases import conv_call
from tests.support.delta_cases import delta_call
from tests.support.indices import assert_unique_as_promised
from tests.support.mamba_cases import mamba_call


@pytest.mark.parametrize("draw", [conv_call, delta_call, mamba_call])
def test_no_slot_is_promised_to_be_read_once_that_padding_reads_too(draw, seed):
    call = draw(seed, (2, 0, 0, 2, 1), num_kept_tokens=torch.tensor([2, 0, 0, 0, 1], dtype=torch.int32))
    call = call.with_arrays({"cache_indices": torch.tensor([3, 3, 3, -1, 0], dtype=torch.int32)})
    call = call.map(lambda array: jnp.asarray(torch.nan_to_num(array.float()).numpy(), str(array.dtype)[6:]))
    moved = (call.tokens_in, call.states_in)

    def total(*arrays: Any) -> jax.Array:
        found = ops.run(call.with_arrays(dict(zip(moved, arrays, strict=True))), "xla")
        return sum((jnp.sum(array) for array in found.values()), jnp.zeros(()))

    assert_unique_as_promised(jax.grad(total, (0, 1)), *(getattr(call, name) for name in moved))
