"""Runs each attention kernel on a few shapes; meant for compute-sanitizer, which reports any bad access.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.kernels.sanitize
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.support.attention_cases import AttentionCase, dense_case, paged_case
from tests.support.backward_cases import backward_call
from tests.support.triton_ops import attention_with_lse, paged_attention_with_lse
from torch_core import ops
from torch_core.specs import AttentionSpec

__all__ = ["shapes", "tall_shapes"]

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


def _long_shapes() -> list[AttentionCase]:
    """Problems for the Hopper kernel, where the device is one: ragged ends, windows, empty sequences, padding."""
    cases = []
    for head_size, window in ((64, None), (128, None), (128, 100), (256, None)):
        sizes = _long_sizes(head_size, window)
        cases.append(paged_case(1, seq_lens=[333, 60, 0, 130], block_size=16, **sizes))
        if window is None and head_size != 64:
            cases.append(dense_case(1, key_lens=[333, 60, 0, 130], **sizes))
    for head_size, window in ((64, None), (128, 100)):
        sizes = {**_long_sizes(head_size, window), "dtype": "float8_e4m3fn"}
        cases.append(paged_case(1, seq_lens=[333, 60, 0, 130], block_size=16, **sizes))
    return cases + tall_shapes() + packed_shapes()


def packed_shapes() -> list[AttentionCase]:
    """Returns the problems for the Hopper kernel's tile of heads side by side: short queries over more keys."""
    cases = []
    for head_size, window in ((64, None), (128, 100)):
        sizes = {**_long_sizes(head_size, window), "num_heads": 8, "query_lens": [100, 1, 0, 40]}
        cases.append(paged_case(1, seq_lens=[600, 60, 0, 130], block_size=16, **sizes))
        cases.append(dense_case(1, key_lens=[2000, 60, 0, 130], **sizes))
        # Few tiles over many keys: these are split.
        cases.append(paged_case(1, seq_lens=[2100, 60, 0, 130], block_size=16, **sizes))
    return cases


def tall_shapes() -> list[AttentionCase]:
    """Returns the problems for the Hopper kernel's tile of three warpgroups: the same, but stated to be longer."""
    cases = []
    for head_size, window in ((64, None), (64, 100), (128, None)):
        sizes = _long_sizes(head_size, window)
        cases.append(paged_case(1, seq_lens=[333, 60, 0, 130], block_size=48, **sizes))
        cases.append(dense_case(1, key_lens=[333, 60, 0, 130], **sizes))
    return [replace(case, limits={**case.limits, "max_query_len": 4096}) for case in cases]


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


def main() -> None:
    """Runs every shape once and waits for the device."""
    for case in shapes():
        case.run(paged_attention_with_lse if case.paged else attention_with_lse, device="cuda")
        if not case.paged:
            ops.run(backward_call(case, ops.run, "cuda", with_d_lse=True))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
