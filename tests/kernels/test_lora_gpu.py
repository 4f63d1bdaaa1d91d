"""Low-rank adapters on a CUDA device: against the reference, from JAX, in a captured graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch

from jattn.bridge import to_jax
from jattn.ops import add_lora_linear
from tests.support.lora_cases import allowed_error, lora_call
from torch_core import ops, reference
from torch_core.adapters.tiles import row_tiles

pytestmark = pytest.mark.gpu
# One row of a tile; small tiles; tiles of 64 rows.
SLOTS = {
    "few": (2, 0),
    "decode": tuple(row % 5 - 1 for row in range(64)),
    "prompts": (0,) * 700 + (-1,) * 9 + (3,) * 300,
}
OPTIONS: dict[str, Any] = {"in_size": 1024, "slices": (512, 128, 128), "rank": 16, "dtype": "bfloat16"}


def results(call: Any) -> Any:
    return ops.run(call).get("out", call.y)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"slices": (256, 256), "activation": "silu", "adds": True},
        {"rank": 5, "in_size": 333, "slices": (190,)},
        {"dtype": "float32"},
        {"rank": 256},
        {"slices": (256, 256, 256, 64, 64, 8)},
        {"heads": (4, 1), "in_size": 128, "slices": (512,)},
        {"heads": (1, 4), "in_size": 512, "slices": (128,)},
    ],
    ids=str,
)
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("rows", SLOTS)
def test_rows_get_their_slots_products(rows, adds, options, seed):
    call = lora_call(seed, SLOTS[rows], **{"adds": adds, **OPTIONS, **options})
    (exact,) = reference.add_lora_linear(call).values()
    found = results(call.map(torch.Tensor.cuda)).cpu()
    assert (found.double() - exact).abs().max() <= allowed_error(call, exact)


@pytest.mark.parametrize("adds", [True, False])
def test_rows_get_the_products_of_their_adapter_and_expert(adds, seed):
    pairs = tuple((37 * row) % 2048 - 1 for row in range(512))
    call = lora_call(seed, pairs, adds=adds, num_slots=2048, in_size=256, slices=(128, 128), rank=16, dtype="bfloat16")
    (exact,) = reference.add_lora_linear(call).values()
    found = results(call.map(torch.Tensor.cuda)).cpu()
    assert (found.double() - exact).abs().max() <= allowed_error(call, exact)


@pytest.mark.parametrize("options", [{}, {"slices": (190,), "rank": 5}, {"heads": (4, 1), "in_size": 128}], ids=str)
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("rows", SLOTS)
def test_a_table_of_tiles_changes_no_bit_in_torch_and_jax(rows, adds, options, seed):
    call = lora_call(seed, SLOTS[rows], adds=adds, **OPTIONS | options)
    wanted = results(call.map(torch.Tensor.cuda))
    order, starts = call.token_indices_sorted_by_lora_ids.numpy(), call.lora_token_start_loc.numpy()
    given = replace(call, lora_tiles=torch.from_numpy(row_tiles(order, starts, np))).map(torch.Tensor.cuda)
    arrays = {"y": None, **given.map(to_jax).arrays()}
    sizes: dict[str, Any] = {"output_slices": call.output_slices, "num_heads": call.num_heads}
    found = jax.jit(lambda arrays: add_lora_linear(**arrays, **sizes))(arrays)
    assert torch.equal(torch.from_dlpack(found), wanted)
    assert torch.equal(results(given), wanted)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("rows", SLOTS)
def test_bits_are_those_of_the_same_kernels_in_jax(rows, adds, seed):
    call = lora_call(seed, SLOTS[rows], adds=adds, **OPTIONS)
    arrays = {"y": None, **call.map(lambda x: to_jax(x.cuda())).arrays()}
    found = jax.jit(lambda arrays: add_lora_linear(**arrays, output_slices=call.output_slices))(arrays)
    assert torch.equal(torch.from_dlpack(found).cpu(), results(call.map(torch.Tensor.cuda)).cpu())


def test_one_captured_graph_serves_other_adapters(seed):
    first, second = (lora_call(seed + each, SLOTS["decode"], **OPTIONS).map(torch.Tensor.cuda) for each in (0, 1))
    wanted = results(second.map(torch.clone))
    ops.run(first.map(torch.clone))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.run(first)
    for name, array in first.arrays().items():
        array.copy_(second.arrays()[name])
    graph.replay()
    assert torch.equal(first.y, wanted)
