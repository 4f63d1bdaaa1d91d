"""CUDA graphs of layers with a state: each replay reads its own step's slots and starts from a builder's metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torch_core import vllm
from torch_core.base.specs import StateCacheSpec
from torch_core.metadata import SequenceRow, build_common_metadata, metadata_layout, state_layout
from torch_core.ops import run
from torch_core.state.conv_call import CausalConvCall
from torch_core.state.delta_call import GatedDeltaCall
from torch_core.state.mamba_call import MambaChunkScanCall
from torch_core.vllm import BuilderConfig, StepBuffers, StepGraphs

ROWS, SLOTS, HEADS, WIDTH, REPLAYS = 4, 9, 2, 128, 60
SIZES: dict[str, Any] = {"num_seqs": ROWS, "num_tokens": ROWS, "max_blocks": 1}
POOL: dict[str, Any] = {"block_size": 16, "num_blocks": 16, "num_slots": SLOTS, "max_query_len": 1, **SIZES}


def delta(rows: torch.Tensor, states: torch.Tensor, batch: Any) -> Any:
    return GatedDeltaCall(
        query=rows, key=rows, value=rows, beta=rows[:, :, 0].sigmoid(), scale=WIDTH**-0.5, max_query_len=1,
        use_qk_l2norm_in_kernel=True, states=states, query_start_loc=batch.non_spec_query_start_loc,
        cache_indices=batch.non_spec_state_indices_tensor, has_initial_state=batch.has_initial_state,
    )  # fmt: skip


def convolution(rows: torch.Tensor, states: torch.Tensor, batch: Any) -> Any:
    return CausalConvCall(
        x=rows.flatten(1), weight=torch.ones(HEADS * WIDTH, 4, device=rows.device, dtype=rows.dtype),
        conv_states=states, query_start_loc=batch.query_start_loc_d, cache_indices=batch.state_indices_tensor_d[:, 0],
    )  # fmt: skip


def scan(rows: torch.Tensor, states: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor) -> Any:
    return MambaChunkScanCall(
        x=rows, dt=rows[:, :, 0].sigmoid(), A=-torch.ones(HEADS, device=rows.device), B=rows, C=rows, max_query_len=1,
        states=states, query_start_loc=starts, cache_indices=slots,
    )  # fmt: skip


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor, Any], Any]] = {
    "GDN": delta,
    "ShortConv": convolution,
    "Mamba2": lambda rows, states, batch: scan(
        rows, states, batch.query_start_loc_d, batch.state_indices_tensor_d[:, 0]
    ),
    "Linear": lambda rows, states, batch: scan(rows, states, batch.query_start_loc, batch.state_indices_tensor),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CALLS)
def test_replays_with_other_slots_and_fewer_rows_equal_eager_steps_bit_for_bit(name, device, seed):
    rng, torch_rng = np.random.default_rng(seed), torch.Generator(device).manual_seed(seed)
    config = BuilderConfig(num_heads=HEADS, mamba_chunk_size=64, max_num_seqs=ROWS)
    shape = (3, HEADS * WIDTH) if name == "ShortConv" else (HEADS, WIDTH, WIDTH)
    spec = StateCacheSpec(shapes=(shape,), dtypes=("float32",))
    builder = getattr(vllm, f"{name}AttentionMetadataBuilder")(spec, ["layer"], config, device)
    buffers = StepBuffers(metadata_layout(**SIZES, extra=state_layout(ROWS)), device)
    empty = build_common_metadata([], layout=buffers.layout, **POOL)
    captured = builder.build_for_cudagraph_capture(empty, arrays=buffers.arrays)
    states = torch.randn(SLOTS, *shape, device=device, generator=torch_rng)
    others, rows = states.clone(), torch.empty(ROWS, HEADS, WIDTH, device=device, dtype=torch.bfloat16)
    graphs = StepGraphs(device)
    graphs.capture(ROWS, lambda: run(CALLS[name](rows, states, captured))["out"])

    for step in range(REPLAYS):
        slots = rng.permutation(np.arange(1, SLOTS))[: rng.integers(1, ROWS + 1)].tolist()
        of_step = [SequenceRow([1 + index], 3 + step % 9, 1, None, slot) for index, slot in enumerate(slots)]
        common = build_common_metadata(of_step, layout=buffers.layout, buffer=buffers.host_buffer(step), **POOL)
        rows.copy_(torch.randn(rows.shape, device=device, generator=torch_rng))
        eager = run(CALLS[name](rows, others, builder.build(0, common)))["out"]
        builder.build(0, common, arrays=buffers.upload(step))

        assert eager[: len(slots)].any(-1).all()
        assert torch.equal(graphs.replay(ROWS), eager), f"step {step}"
        assert torch.equal(states, others), f"step {step}"
