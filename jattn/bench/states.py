"""Layers with a recurrent state: prompts, decode steps and gradients, next to flash-linear-attention and vLLM."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import torch

from jattn.bench import measure
from jattn.bench.report import OURS, BenchReport, Row
from jattn.bench.runner import Benchmark, sizes
from jattn.bench.session import Column, Session, in_graph, with_ours
from torch_core.base.errors import InvalidInput
from torch_core.launch.run import run as run_call
from torch_core.state.backward_call import GatedDeltaBackwardCall, MambaChunkScanBackwardCall
from torch_core.state.delta_call import GatedDeltaCall
from torch_core.state.mamba_call import MambaChunkScanCall

#: Sequences and new tokens of each, in the rows of the default table.
SHAPES = ("1x8192", "8x2048", "1x65536", "1x1", "64x1", "256x1")
# Of Qwen3-Next: columns of keys and of values. Of Nemotron-H: those of a head, groups, columns of a state.
_KEY_SIZE = 128
_HEAD_DIM, _GROUPS, _STATE_SIZE = 64, 8, 128
_CHUNK = 256


def run(
    *,
    shapes: Sequence[str] = SHAPES,
    operations: Sequence[Literal["gdn", "kda", "mamba"]] = ("gdn", "kda", "mamba"),
    kv_heads: int = 16,
    heads: int = 32,
    mamba_heads: int = 128,
    backward: bool = False,
) -> BenchReport:
    """Measures every operation at every shape, bfloat16 with float32 states: the GPU time of its kernels.

    Decode steps, and Mamba-2 and its peer, are timed in CUDA graphs, with the gaps between their kernels. They find
    their states in memory; a decode step finds all else in the cache, as in a model, which made or read it just before.

    The peers, the packages flash-linear-attention and vLLM, are measured where they are installed.

    Args:
        shapes: "SEQUENCESxTOKENS" of each row; with one token a decode step.
        operations: "gdn" for the gated delta rule, "kda" for that with a decay for each channel, "mamba" for Mamba-2.
        kv_heads: heads of queries and keys, of the delta rules.
        heads: heads of values, of the delta rules.
        mamba_heads: heads of Mamba-2, in 8 groups.
        backward: the gradients instead, of prompts.
    """
    if unknown := set(operations) - set(_CALLS):
        raise InvalidInput("operations", value=sorted(unknown), wanted=f"they must be among {', '.join(_CALLS)}")
    session = Session("states")
    for operation in operations:
        for num_seqs, tokens in map(sizes, shapes):
            if backward and tokens == 1:
                continue
            num_heads = (mamba_heads, mamba_heads) if operation == "mamba" else (heads, kv_heads)
            made = functools.partial(_CALLS[operation], num_seqs, tokens, *num_heads)
            calls = [_backward(made()) if backward else made()]
            least = _least_bytes(calls[0])
            is_graph = not backward and (operation == "mamba" or tokens == 1)
            for _ in range(1, measure.num_pools(least) if is_graph else 1):
                calls.append(replace(calls[0], states=calls[0].states.clone()) if tokens == 1 else made())
            row = Row(f"{operation} {num_seqs} x {tokens}", least / session.copy * 1e6, {})
            columns = _columns(operation, in_graph if is_graph else _kernels, backward=backward)
            session.add(row, columns, calls, required=(OURS,))
    return session.report(f"layers with a state{', gradients' if backward else ''}", compared=with_ours)


def _columns(
    operation: str, timed: Callable[[Callable[[Any], Callable[[], Any]]], Column], *, backward: bool
) -> dict[str, Column]:
    columns = {OURS: timed(_ours)}
    if operation != "mamba" and _is_installed("fla"):
        columns["fla"] = timed(_fla_backward if backward else _fla)
    elif operation == "mamba" and not backward and _is_installed("vllm"):
        columns["vLLM"] = timed(_vllm)
    return columns


def _ours(call: Any) -> Callable[[], Any]:
    return lambda: run_call(call)


def _kernels(made: Callable[[Any], Callable[[], Any]]) -> Column:
    return lambda batches: measure.kernels_us(made(batches[0]))


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _delta(num_seqs: int, tokens: int, heads: int, kv_heads: int, *, by_channel: bool = False) -> Any:
    query, key = (_random(num_seqs * tokens, kv_heads, _KEY_SIZE) for _ in range(2))
    gates = -0.5 * torch.rand(num_seqs * tokens, heads, *([_KEY_SIZE] * by_channel), device="cuda")
    return GatedDeltaCall(
        query=query,
        key=key,
        value=_random(num_seqs * tokens, heads, _KEY_SIZE),
        beta=_random(num_seqs * tokens, heads).sigmoid(),
        scale=_KEY_SIZE**-0.5,
        use_qk_l2norm_in_kernel=True,
        **{"gk" if by_channel else "g": gates},
        **_of_sequences(num_seqs, tokens, heads, _KEY_SIZE, _KEY_SIZE),
    )


def _mamba(num_seqs: int, tokens: int, heads: int, _: int) -> Any:
    return MambaChunkScanCall(
        x=_random(num_seqs * tokens, heads, _HEAD_DIM),
        dt=_random(num_seqs * tokens, heads) - 3,
        A=-8 * torch.rand(heads, device="cuda") - 0.1,
        B=_random(num_seqs * tokens, _GROUPS, _STATE_SIZE),
        C=_random(num_seqs * tokens, _GROUPS, _STATE_SIZE),
        D=torch.randn(heads, device="cuda"),
        dt_bias=torch.randn(heads, device="cuda"),
        dt_softplus=True,
        **_of_sequences(num_seqs, tokens, heads, _HEAD_DIM, _STATE_SIZE),
    )


def _of_sequences(num_seqs: int, tokens: int, *state: int) -> dict[str, Any]:
    return {
        "states": 0.1 * torch.randn(num_seqs, *state, device="cuda"),
        "query_start_loc": torch.arange(0, num_seqs * tokens + 1, tokens, device="cuda", dtype=torch.int32),
        "cache_indices": torch.arange(num_seqs, device="cuda", dtype=torch.int32),
        "has_initial_state": torch.ones(num_seqs, device="cuda", dtype=torch.bool),
        "max_query_len": tokens,
    }


_CALLS: dict[str, Callable[[int, int, int, int], Any]] = {
    "gdn": _delta,
    "kda": functools.partial(_delta, by_channel=True),
    "mamba": _mamba,
}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _backward(call: Any) -> Any:
    kind = MambaChunkScanBackwardCall if isinstance(call, MambaChunkScanCall) else GatedDeltaBackwardCall
    return kind.for_call(call, d_out=torch.randn_like(getattr(call, kind.values_in)))


def _least_bytes(call: Any) -> int:
    """Returns the bytes of all inputs, of states that are read and written, and of the output."""
    arrays = [value for each in fields(call) if isinstance(value := getattr(call, each.name), torch.Tensor)]
    values = getattr(call, "x" if isinstance(call, MambaChunkScanCall) else "value")
    return sum(each.nbytes for each in (*arrays, getattr(call, call.states_in), values))


def _fla(call: Any) -> Callable[[], Any]:
    attend, arrays = _of_fla(call)
    return lambda: attend(**arrays)


def _fla_backward(call: Any) -> Callable[[], Any]:
    attend, arrays = _of_fla(call)
    inputs = [arrays[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")]
    out, _ = attend(**arrays)
    return lambda: torch.autograd.grad(out, inputs, call.d_out[None], retain_graph=True)


def _of_fla(call: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    module = "fla.ops.gated_delta_rule" if call.gk is None else "fla.ops.kda"
    name = "gated_delta_rule" if call.gk is None else "kda"
    is_decode = call.max_query_len == 1
    attend = getattr(importlib.import_module(module), f"{'fused_recurrent' if is_decode else 'chunk'}_{name}")
    # Its decode step has a batch of sequences, its prompts have one row of packed ones; key and value heads are alike.
    axis, times = (1 if is_decode else 0), call.value.shape[1] // call.query.shape[1]
    arrays = {
        "q": call.query.repeat_interleave(times, 1),
        "k": call.key.repeat_interleave(times, 1),
        "v": call.value,
        "g": call.g if call.gk is None else call.gk,
        "beta": call.beta,
    }
    options: dict[str, Any] = {} if is_decode else {"cu_seqlens": call.query_start_loc.long()}
    return attend, {
        **{name: array.unsqueeze(axis) for name, array in arrays.items()},
        "scale": call.scale,
        "initial_state": call.states.transpose(-1, -2).contiguous(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        **options,
    }


def _vllm(call: Any) -> Callable[[], Any]:
    folder, out = "vllm.model_executor.layers.mamba.ops", torch.empty_like(call.x)
    common = {"dt_bias": call.dt_bias, "dt_softplus": True, "out": out}
    if call.max_query_len == 1:
        update = importlib.import_module(f"{folder}.mamba_ssm").selective_state_update
        dim, state = call.states.shape[2:]
        dt, skip, bias = (each[..., None].expand(*each.shape, dim) for each in (call.dt, call.D, call.dt_bias))
        decay = call.A[:, None, None].expand(-1, dim, state)
        # It would leave out the sequence in slot 0, its states' bytes too.
        given = {**common, "dt_bias": bias, "state_batch_indices": call.cache_indices, "null_block_id": -1}
        return lambda: update(call.states, call.x, dt, decay, call.B, call.C, skip, **given)
    scan = importlib.import_module(f"{folder}.ssd_combined").mamba_chunk_scan_combined_varlen
    num_seqs, tokens = len(call.states), call.max_query_len
    chunks = -(-tokens // _CHUNK)
    starts = [seq * tokens + chunk * _CHUNK for seq in range(num_seqs) for chunk in range(chunks)]
    edges = torch.tensor([*starts, num_seqs * tokens], device="cuda", dtype=torch.int32)
    last = torch.arange(chunks - 1, num_seqs * chunks, chunks, device="cuda", dtype=torch.int32)
    owners = torch.arange(num_seqs, device="cuda", dtype=torch.int32).repeat_interleave(chunks)
    return lambda: scan(
        call.x, call.dt, call.A, call.B, call.C, _CHUNK, call.query_start_loc, edges, last, owners,
        D=call.D, initial_states=call.states, state_dtype=torch.float32, **common,
    )  # fmt: skip


BENCHMARK = Benchmark("states", __doc__, run)
