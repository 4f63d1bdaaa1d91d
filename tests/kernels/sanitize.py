"""Runs each attention kernel on a few shapes; meant for compute-sanitizer, which reports any bad access.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.kernels.sanitize

Names of groups (forward, backward, dropout, latent, state, adapters, quantized, experts, rows, caches) after it run
those alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.support.attention_cases import AttentionCase, dense_case, paged_case, with_dropout
from tests.support.backward_cases import backward_call
from tests.support.conv_cases import conv_call
from tests.support.delta_cases import delta_backward_call, delta_call
from tests.support.expert_cases import experts_call, route_call
from tests.support.gated_product_cases import gated_product
from tests.support.latent_cases import LatentCase, latent_case
from tests.support.latent_writes import rotary_write
from tests.support.lora_cases import lora_call
from tests.support.mamba_cases import mamba_backward_call, mamba_call
from tests.support.rotary_writes import quarter_turns
from tests.support.sparse_cases import indexer_call, sparse_case
from tests.support.triton_ops import attention_with_lse, paged_attention_with_lse
from torch_core import ops
from torch_core.attention.merge_call import MergeCall
from torch_core.base.specs import AttentionSpec
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.latent.sparse_call import ChoiceCall
from torch_core.launch.call import Call
from torch_core.rowwise.call import RowLogSumExpCall, RowNormCall, RowProductCall, RowQuantizeCall

__all__ = [
    "adapter_calls",
    "backward_shapes",
    "cache_calls",
    "dropout_shapes",
    "expert_calls",
    "latent_shapes",
    "problems",
    "quantized_calls",
    "row_calls",
    "shapes",
    "state_calls",
]

_INDEXED: dict[str, Any] = {"seq_lens": [333, 0, 9], "query_lens": [2, 0, 9], "num_heads": 64, "head_size": 128}
_LENGTHS = (
    ([1, 17, 300], [1, 1, 1]),
    ([129, 0, 64], [4, 0, 1]),
    ([200, 40, 5], [200, 1, 5]),
    ([333], [100]),
)


def shapes() -> list[AttentionCase]:
    """Returns twelve problems for each of: split and combine, rows over pages, rows over dense keys; and long ones."""
    cases = []
    for index, (seq_lens, query_lens) in enumerate(_LENGTHS):
        for head_size, block_size, dtype, cache_dtype in (
            (128, 16, "bfloat16", None),
            (80, 7, "float16", "float8_e4m3fn"),
            (256, 1, "float32", None),
        ):
            spec = AttentionSpec(scale=0.1, window_left=50 if index % 2 else None)
            sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": head_size, "spec": spec, "dtype": dtype}
            lens = {"query_lens": query_lens, "padding_tokens": 3}
            cases.append(
                paged_case(
                    index,
                    seq_lens=seq_lens,
                    query_lens=[min(n, 2) for n in query_lens],
                    block_size=block_size,
                    cache_dtype=cache_dtype,
                    **sizes,
                )
            )
            cases.append(
                paged_case(index, seq_lens=seq_lens, block_size=block_size, cache_dtype=cache_dtype, **lens, **sizes)
            )
            cases.append(dense_case(index, key_lens=seq_lens, **lens, **sizes))
    return cases + _long_shapes()


def backward_shapes() -> list[AttentionCase]:
    """Returns the dense problems, and those of each tile of the Hopper kernel: ragged ends, sinks, unseen keys."""
    cases = [case for case in shapes() if not case.paged]
    for head_size, value_head_size, window in ((64, 64, None), (128, 128, 260), (192, 128, None), (256, 256, 260)):
        sizes = {**_long_sizes(head_size, window), "query_lens": [300, 1, 0, 130]}
        sinks = np.linspace(-1, 1, sizes["num_heads"], dtype=np.float32) if head_size == value_head_size else None
        more = {"value_head_size": value_head_size, **({} if sinks is None else {"sinks": sinks})}
        case = dense_case(1, key_lens=[700, 60, 0, 130], **more, **sizes)
        cases += [case, case.with_longest_query(4096)]
    return cases


def dropout_shapes() -> list[AttentionCase]:
    """Returns dense problems that drop weights, for each size of tile."""
    sizes = [_long_sizes(64, None), _long_sizes(128, 100), _long_sizes(256, None)]
    sizes.append({**_long_sizes(80, None), "dtype": "float32"})
    cases = [dense_case(1, key_lens=[333, 60, 0, 130], **size) for size in sizes]
    long = cases[1].with_longest_query(8192)
    return [with_dropout(case, 0.2) for case in (*cases, long)]


def latent_shapes() -> list[LatentCase | Call[torch.Tensor]]:
    """Returns problems of DeepSeek's sizes for the portable and the Hopper kernel, in one chunk and in many."""
    sizes: dict[str, Any] = {"kv_lora_rank": 512, "rope_dim": 64, "dtype": "bfloat16", "padding_tokens": 3}
    cases = [
        latent_case(1, seq_lens=[1500, 1, 0, 70], query_lens=[2, 1, 0, 2], num_heads=heads, block_size=block, **sizes)
        for heads, block in ((9, 7), (16, 64), (63, 48), (128, 64))
    ]
    cases.append(latent_case(1, seq_lens=[333], query_lens=[8], num_heads=16, cache_dtype="float8_e4m3fn", **sizes))
    cases.append(latent_case(1, seq_lens=[333, 0, 9], query_lens=[2, 0, 1], num_heads=16, packed=True, **sizes))
    uneven = {"seq_lens": [70] * 20 + [0, 3200], "query_lens": [1] * 20 + [0, 1], "num_heads": 128}
    cases.append(latent_case(1, block_size=64, **uneven, **sizes))
    chosen = {"seq_lens": [333, 0, 9], "query_lens": [2, 0, 1], "topk": 130}
    for heads, packed in ((16, False), (16, True), (128, False), (128, True)):
        cases.append(sparse_case(1, num_heads=heads, packed=packed, **chosen, **sizes))
    cached = rotary_write(1, torch.uint8, rank=512, rope_dim=64, tokens=70)
    return [*cases, indexer_call(1, **_INDEXED), cached]


def state_calls() -> list[Call[torch.Tensor]]:
    """Returns calls of layers with a state: decoded tokens, prompts in chunks and token by token, tails."""
    lens = (70, 1, 0, 130, 2)
    convolutions = [conv_call(1, lens, num_channels=300, width=width, dtype="bfloat16") for width in (2, 4, 7)]
    convolutions.append(conv_call(1, lens, num_channels=300, first_column=5, out_sizes=(44, 256), dtype="bfloat16"))
    sizes: dict[str, Any] = {"dtype": "bfloat16", "sizes": (80, 48)}
    deltas = [delta_call(1, lens, gates=gates, **sizes) for gates in ("g", "gk", None)]
    deltas += [delta_backward_call(each) for each in deltas]
    # In spans and token by token.
    lens, mamba = (2500, 1, 0, 40), {"heads": (3, 1), "dtype": "bfloat16"}
    mambas = [mamba_call(1, lens, sizes=each, **mamba) for each in ((40, 20), (64, 256))]
    mambas += [mamba_backward_call(each) for each in mambas]
    # Keys of 128 have kernels of Hopper's for one token and for a few; a long prompt of few heads goes in segments.
    for gates, few in (("g", 8), ("gk", 4)):
        for lens in ((1,) * 40, (few, 1, 0, few) * 5, (2500, 1, 0, 40)):
            deltas.append(delta_call(1, lens, gates=gates, sizes=(128, 72), dtype="bfloat16"))
    decoded = [delta_call(1, (1,) * 40, **sizes), mamba_call(1, (1,) * 40)]
    # Without padding there are as many tokens as sequences.
    for padding in (3, 0):
        decoded.append(conv_call(1, (1,) * 40, first_column=3, out_sizes=(5, 12, 3), padding=padding))
    return [*convolutions, *deltas, *mambas, *decoded]


def adapter_calls() -> list[Call[torch.Tensor]]:
    """Returns calls of low-rank adapters: few rows, decoded tokens, prompts; sizes that fill no tile."""
    slots = ((1, 0), (0, 2, -1, 2, 1), (0,) * 150 + (2,) * 70)
    sizes: dict[str, Any] = {"num_slots": 3, "in_size": 300, "slices": (130, 20, 7), "rank": 5}
    calls = [lora_call(1, each, dtype=dtype, **sizes) for each in slots for dtype in ("bfloat16", "float32")]
    gated: dict[str, Any] = {**sizes, "slices": (130, 130), "activation": "silu", "dtype": "bfloat16"}
    calls += [lora_call(1, each, **gated) for each in slots]
    # As many slots as pairs of experts, rows of which several have one input.
    sizes["num_slots"] = 301
    return [*calls, lora_call(1, (300, -1, 7, 7), rows_of_input=2, adds=False, dtype="bfloat16", **sizes)]


def quantized_calls() -> list[Call[torch.Tensor]]:
    """Returns calls whose results are e4m3: rows that fill no chunk, activations, sums and norms, rotated products."""
    generator, calls = torch.Generator().manual_seed(1), list[Call[torch.Tensor]]()
    for features in (70, 2048, 14336):
        x, residual = (torch.randn(5, width, generator=generator).bfloat16() for width in (2 * features, features))
        scales: dict[str, Any] = {"row_scale": torch.rand(5), "column_scale": torch.rand(2 * features)}
        calls.append(RowQuantizeCall(x=x, activation="silu", **scales))
        calls.append(RowQuantizeCall(x=residual, residual=residual, weight=residual[0], epsilon=1e-5))
        calls.append(RowQuantizeCall(x=x[:, :features]))
    return [*calls, *(quarter_turns(1, torch.float8_e4m3fn, tokens=n, scaled=True) for n in (5, 600))]


def expert_calls() -> list[Call[torch.Tensor]]:
    """Returns calls of experts and routers: one token, few, many; sizes that fill no tile; ids of no expert."""
    calls: list[Call[torch.Tensor]] = []
    for num_tokens in (1, 20, 700):
        # The kernel for Hopper takes 16 bits and whole steps of 64 inputs.
        for dtype, inner in (("bfloat16", 64), ("bfloat16", 72), ("float32", 72)):
            sizes: dict[str, Any] = {"hidden": 192, "inner": inner, "dtype": dtype}
            calls.append(experts_call(1, num_tokens, bias=True, unused=0.3, **sizes))
            calls.append(experts_call(1, num_tokens, adapted=True, **sizes))
        calls.append(route_call(1, num_tokens, num_experts=90, hidden=200, dtype="bfloat16", corrected=True))
    return calls


def row_calls() -> list[Call[torch.Tensor]]:
    """Returns calls on rows that fill no tile."""
    generator, calls = torch.Generator().manual_seed(1), list[Call[torch.Tensor]]()
    for num_rows in (1, 67):
        x, kernel = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((num_rows, 136), (136, 72)))
        calls += [RowProductCall(x=x, kernel=kernel), RowLogSumExpCall(x=x.float())]
        calls.append(RowNormCall(x=x, weight=kernel.T[:1].contiguous(), epsilon=1e-5, norm_type="rms_norm"))
        calls.append(gated_product(1, num_rows, 320, 72, torch.bfloat16))
    return calls


def cache_calls() -> list[Call[torch.Tensor]]:
    """Returns writes, copies, merges and choices of slots, with entries that name nothing."""
    torch.manual_seed(1)
    slots = torch.tensor([5, -1, 34, 0], dtype=torch.int32)
    key, value = torch.randn(6, 2, 80).bfloat16(), torch.randn(6, 2, 80).bfloat16()
    calls: list[Call[torch.Tensor]] = []
    for dtype, one in ((torch.bfloat16, None), (torch.float8_e4m3fn, 0.5)):
        cache = torch.zeros(5, 2, 7, 2, 80).to(dtype)
        calls.append(WriteCall(key=key, value=value, slot_mapping=slots, kv_cache=cache, k_scale=one, v_scale=one))
    scales = {name: torch.zeros(5, 7, 2) for name in ("k_scale_cache", "v_scale_cache")}
    calls.append(WriteCall(key=key, value=value, slot_mapping=slots, kv_cache=cache, **scales))
    pairs = torch.tensor([[0, 3], [-1, 2], [1, 4]], dtype=torch.int32)
    calls.append(CopyCall(kv_cache=cache, block_mapping=pairs))
    lse = torch.randn(6, 2)
    calls.append(MergeCall(out_a=key, lse_a=lse, out_b=value, lse_b=lse, num_tokens_a=4))
    tables, starts = torch.tensor([[1, 3], [2, 0]], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
    chosen = torch.tensor([[0, 9, -1], [13, -1, -1], [4, 99, 2], [-1, -1, -1]], dtype=torch.int32)
    calls.append(ChoiceCall(topk_indices=chosen, block_tables=tables, query_start_loc=starts, block_size=7))
    return calls


def _long_shapes() -> list[AttentionCase]:
    """Problems for the Hopper kernel, where the device is one: ragged ends, windows, empty sequences, padding."""
    cases = []
    for head_size, window in ((64, None), (128, None), (128, 100), (256, None)):
        sizes = _long_sizes(head_size, window)
        cases.append(paged_case(1, seq_lens=[333, 60, 0, 130], block_size=16, **sizes))
        if window is None and head_size != 64:
            cases.append(dense_case(1, key_lens=[333, 60, 0, 130], **sizes))
    for head_size, window in ((64, None), (128, 100), (256, 100)):
        sizes = {**_long_sizes(head_size, window), "dtype": "float8_e4m3fn"}
        cases.append(paged_case(1, seq_lens=[333, 60, 0, 130], block_size=16, **sizes))
    return cases + _tall_shapes() + _packed_shapes() + _wide_key_shapes()


def _packed_shapes() -> list[AttentionCase]:
    """Returns the problems for the Hopper kernel's tile of heads side by side: short queries over more keys."""
    cases = []
    for head_size, window in ((64, None), (128, 100)):
        sizes = {**_long_sizes(head_size, window), "num_heads": 8, "query_lens": [100, 1, 0, 40]}
        cases.append(paged_case(1, seq_lens=[600, 60, 0, 130], block_size=16, **sizes))
        cases.append(dense_case(1, key_lens=[2000, 60, 0, 130], **sizes))
        # Few tiles over many keys: these are split.
        cases.append(paged_case(1, seq_lens=[2100, 60, 0, 130], block_size=16, **sizes))
        cases.append(paged_case(1, seq_lens=[2100, 60, 0, 130], block_size=16, **{**sizes, "dtype": "float8_e4m3fn"}))
    return cases


def _wide_key_shapes() -> list[AttentionCase]:
    """Returns the problems whose keys have 192 elements and values 128, for both tiles of the Hopper kernel."""
    case = dense_case(1, key_lens=[333, 60, 0, 130], value_head_size=128, **_long_sizes(192, None))
    return [case, case.with_longest_query(4096)]


def _tall_shapes() -> list[AttentionCase]:
    """Returns the problems for the Hopper kernel's tile of three warpgroups: the same, but stated to be longer."""
    cases = []
    for head_size, window in ((64, None), (64, 100), (128, None)):
        sizes = _long_sizes(head_size, window)
        cases.append(paged_case(1, seq_lens=[333, 60, 0, 130], block_size=48, **sizes))
        cases.append(dense_case(1, key_lens=[333, 60, 0, 130], **sizes))
    sizes = {**_long_sizes(64, 100), "dtype": "float8_e4m3fn"}
    cases.append(paged_case(1, seq_lens=[333, 60, 0, 130], block_size=48, **sizes))
    return [case.with_longest_query(4096) for case in cases]


def _long_sizes(head_size: int, window: int | None) -> dict[str, Any]:
    return {
        "query_lens": [200, 1, 0, 130],
        "padding_tokens": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": head_size,
        "spec": AttentionSpec(scale=0.1, window_left=window),
        "dtype": "bfloat16",
    }


def main(groups: Sequence[str]) -> None:
    """Runs every shape of the groups once, of all groups where none is named, and waits for the device."""
    for case, differentiate in problems(groups):
        _run(case, differentiate=differentiate)
    torch.cuda.synchronize()


def problems(groups: Sequence[str] = ()) -> Iterator[tuple[AttentionCase | LatentCase | Call[torch.Tensor], bool]]:
    """Yields every problem of the groups, of all where none is named, and whether its gradient is one too."""
    for name in groups or _GROUPS:
        for case in _GROUPS[name]():
            yield case, name in ("backward", "dropout")


def _run(case: AttentionCase | LatentCase | Call[torch.Tensor], *, differentiate: bool) -> None:
    if isinstance(case, Call):
        ops.run(case.map(torch.Tensor.cuda))
    elif isinstance(case, LatentCase):
        ops.run(case.call("cuda", with_lse=True))
    elif differentiate:
        call = backward_call(case, ops.run, "cuda", with_d_lse=True)
        ops.run(call)
        ops.run(replace(call, deterministic=False))
    else:
        case.run(paged_attention_with_lse if case.paged else attention_with_lse, "cuda")


_GROUPS: dict[str, Callable[[], Sequence[AttentionCase | LatentCase | Call[torch.Tensor]]]] = {
    "forward": shapes,
    "backward": backward_shapes,
    "dropout": dropout_shapes,
    "latent": latent_shapes,
    "state": state_calls,
    "adapters": adapter_calls,
    "quantized": quantized_calls,
    "experts": expert_calls,
    "rows": row_calls,
    "caches": cache_calls,
}


if __name__ == "__main__":
    main(sys.argv[1:])
