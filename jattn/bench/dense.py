"""Columns of dense causal attention over sequences of one length: this project's call and its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from jattn.bench import measure, peers
from jattn.bench.session import Column
from torch_core.attention.call import DenseCall
from torch_core.launch.run import run


def ours(call: DenseCall[torch.Tensor]) -> Callable[[], Any]:
    """Returns this project's call, into an output of its own."""
    call = replace(call, out=_output(call))
    return lambda: run(call)


def sdpa(backend: str, call: DenseCall[torch.Tensor]) -> Callable[[], Any]:
    """Returns the same attention by torch's scaled_dot_product_attention; see `peers.sdpa`."""
    attend = peers.sdpa(backend)
    rows = [x.unflatten(0, (-1, call.max_query_len)).transpose(1, 2) for x in (call.query, call.key, call.value)]
    return lambda: attend(*rows, causal=True)


def fa3(found: Any, call: DenseCall[torch.Tensor]) -> Callable[[], Any]:
    """Returns the same attention by FlashAttention-3; `found` is the result of `peers.load_peers`."""
    starts, length, out = call.query_start_loc, call.max_query_len, _output(call)
    bounds = {"cu_q": starts, "cu_k": starts, "max_q": length, "max_k": length}
    return lambda: found.fa3(call.query, call.key, call.value, out=out, **bounds)


def in_jax(attend: Callable[..., Any]) -> Column:
    """Returns the column of a JAX function `attend(query, key, value, starts, length)`; see `measure.chained_us`."""

    def timed(calls: list[DenseCall[torch.Tensor]]) -> float:
        length = calls[0].max_query_len

        def step(query: Any, *arrays: Any) -> Any:
            return attend(query, *arrays, length)

        same_size = calls[0].value_head_size == calls[0].query.shape[-1]
        tensors = [(call.key, call.value, call.query_start_loc) for call in calls]
        step = step if same_size else measure.fed(step)
        return measure.chained_us(step, calls[0].query, tensors, rotations=4, rounds=5)

    return timed


def attend(query: Any, key: Any, value: Any, starts: Any, length: int) -> Any:
    """Runs this project's JAX function for `in_jax`."""
    from jattn import ops

    return ops.attention(query, key, value, starts, max_query_len=length, implementation="triton")


def cudnn(query: Any, key: Any, value: Any, starts: Any, length: int, *, call: Callable[..., Any] = peers.cudnn) -> Any:
    """Runs `peers.cudnn`, or `peers.cudnn_fp8`, for `in_jax`."""
    rows = [x.reshape(-1, length, *x.shape[1:]) for x in (query, key, value)]
    return call(*rows).reshape(*query.shape[:2], -1)


def _output(call: DenseCall[torch.Tensor]) -> torch.Tensor:
    return call.query.new_empty(*call.query.shape[:2], call.value_head_size)
