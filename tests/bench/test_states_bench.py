"""The benchmark of layers with a state: what it needs, and the bytes that its ceilings count."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch

from jattn.bench import states
from jattn.bench.runner import main
from tests.support.delta_cases import delta_call
from tests.support.mamba_cases import mamba_call
from torch_core.base.errors import InvalidInput, Unsupported


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it would run")
def test_layers_with_a_state_are_measured_on_cuda() -> None:
    with pytest.raises(Unsupported, match="jattn bench states measures CUDA kernels"):
        main(states.BENCHMARK, ["--operations", "gdn"])


def test_an_operation_that_it_does_not_know_is_named() -> None:
    with pytest.raises(InvalidInput, match="rwkv"):
        states.run(operations=("gdn", "rwkv"))  # pyright: ignore[reportArgumentType]


def test_states_count_twice_and_every_input_once(seed: int) -> None:
    call = delta_call(seed)
    arrays = [value for name in call.__slots__ if isinstance(value := getattr(call, name, None), torch.Tensor)]
    found = states._least_bytes(call)  # pyright: ignore[reportPrivateUsage]
    assert found >= sum(each.nbytes for each in arrays) + call.states.nbytes + call.value.nbytes


def test_the_peer_leaves_out_no_sequence(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}
    peer = SimpleNamespace(selective_state_update=lambda *_, **given: options.update(given))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.mamba.ops.mamba_ssm", peer)
    states._vllm(mamba_call(seed, (1, 1, 1), padding=0))()  # pyright: ignore[reportPrivateUsage]
    # Of vLLM's own choice it is slot 0.
    assert options["null_block_id"] < 0
