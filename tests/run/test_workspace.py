"""Where a planned call's scratch comes from; the launches themselves need CUDA and are left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.latent_cases import latent_case
from torch_core.launch import launcher as launch
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.run import scratch_of
from torch_core.launch.tensors import array_spec
from torch_core.vllm import WorkspaceManager


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The buffers of each launch."""
    found: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(launch, "device_limits", lambda device: DeviceLimits())
    monkeypatch.setattr(launch, "_prepared", lambda plan, index: ())
    monkeypatch.setattr(launch, "_launch", lambda launches, buffers, device: found.append(dict(buffers)))
    launch._ready.cache_clear()
    yield found
    launch._ready.cache_clear()


@pytest.mark.parametrize("given", [True, False])
def test_scratch_is_taken_from_a_workspace_where_there_is_one(given, launched):
    call: Any = latent_case(1, seq_lens=[400], query_lens=[1], num_heads=2).call(with_lse=True, kv_chunk_size=128)
    workspace, cpu = WorkspaceManager("cpu"), torch.device("cpu")
    needed = scratch_of(call.map(array_spec), cpu)
    workspace.get_simultaneous(*needed)
    workspace.lock()

    results = launch.run_planned(call, call.arrays(), cpu, workspace if given else None)

    assert results.keys() == {"out", "lse"}
    partials = [launched[0][name] for name in ("partial_out", "partial_max", "partial_sum")]
    assert [(tuple(x.shape), x.dtype) for x in partials] == needed
    start = workspace._buffer.data_ptr()
    assert [start <= x.data_ptr() < start + workspace.num_bytes for x in partials] == [given] * 3
