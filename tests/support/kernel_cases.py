"""Wide random attention problems for the kernels on a GPU, and small ones for the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.attention_cases import (
    AttentionCase,
    dense_case,
    paged_case,
    random_dense_case,
    random_paged_case,
)
from torch_core.base.specs import AttentionSpec

__all__ = ["interpreter_case", "wide_case"]

_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 192, 256, 320, 512)
_BLOCK_SIZES = (1, 7, 8, 16, 16, 32, 64, 128, 256)


def interpreter_case(seed: int) -> AttentionCase:
    """Draws a problem of a few tokens, two paged ones for each dense one."""
    if seed % 3 == 2:
        return random_dense_case(seed, max_len=14)
    return random_paged_case(seed, max_seq_len=18)


def wide_case(seed: int) -> AttentionCase:
    """Draws a problem with every head size, block size and group size that the kernels claim, up to 700 tokens."""
    rng = np.random.default_rng([seed, 7])
    num_kv_heads = int(rng.choice([1, 2, 4]))
    group = int(rng.choice([1, 2, 3, 4, 5, 7, 8, 16, 71])) if rng.random() < 0.7 else 4
    head_size = int(rng.choice(_HEAD_SIZES))
    dtype = str(rng.choice(["bfloat16", "bfloat16", "float16", "float32"]))
    num_seqs = int(rng.choice([1, 2, 3, 9, 33]))
    longest = 700 if num_seqs < 9 else 150
    seq_lens = [int(rng.integers(0, longest)) for _ in range(num_seqs)]
    kind = str(rng.choice(["decode", "speculative", "prefill", "mixed"]))
    query_lens = [min(n, _query_len(rng, kind, n)) for n in seq_lens]
    sizes: dict[str, Any] = {
        "num_heads": num_kv_heads * group if group < 71 else 71,
        "num_kv_heads": num_kv_heads if group < 71 else 1,
        "head_size": head_size,
        "dtype": dtype,
        "spec": _spec(rng, head_size),
        "padding_tokens": int(rng.choice([0, 1, 40])),
        "values": str(rng.choice(["gaussian", "sparse", "large"], p=[0.7, 0.2, 0.1])),
    }
    options = _options(rng, sizes["num_heads"])
    if rng.random() < 0.3:
        value_head_size = int(rng.choice(_HEAD_SIZES)) if rng.random() < 0.4 else None
        return dense_case(
            seed, key_lens=seq_lens, query_lens=query_lens, value_head_size=value_head_size, **sizes, **options
        )
    cache_dtype = str(rng.choice(["float8_e4m3fn", "float8_e5m2", "int8"])) if rng.random() < 0.25 else None
    if cache_dtype is not None:
        unit = 0.025 if cache_dtype == "int8" else 1.0
        options["k_scale"] = float(rng.uniform(0.5, 2)) * unit
        options["v_scale"] = np.array([rng.uniform(0.5, 2) * unit], np.float32)
        sizes["values"] = "gaussian"
    return paged_case(
        seed,
        seq_lens=seq_lens,
        query_lens=query_lens,
        block_size=int(rng.choice(_BLOCK_SIZES)),
        cache_dtype=cache_dtype,
        **sizes,
        **options,
    )


def _query_len(rng: np.random.Generator, kind: str, seq_len: int) -> int:
    choices = {"decode": [1], "speculative": [1, 2, 3, 8], "prefill": [seq_len], "mixed": [0, 1, 1, 2, 100, seq_len]}
    return int(rng.choice(choices[kind]))


def _spec(rng: np.random.Generator, head_size: int) -> AttentionSpec:
    return AttentionSpec(
        scale=float(head_size**-0.5) * (-1.0 if rng.random() < 0.1 else 1.0),
        causal=bool(rng.random() < 0.8),
        window_left=int(rng.choice([0, 1, 63, 64, 127, 400])) if rng.random() < 0.25 else None,
        window_right=int(rng.choice([0, 5, 64])) if rng.random() < 0.15 else None,
        logits_soft_cap=float(rng.uniform(5, 50)) if rng.random() < 0.15 else None,
        attention_chunk=int(rng.choice([16, 100, 128])) if rng.random() < 0.1 else None,
        use_alibi_sqrt=bool(rng.random() < 0.5),
    )


def _options(rng: np.random.Generator, num_heads: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.15:
        options["alibi_slopes"] = rng.uniform(0.01, 0.5, num_heads).astype(np.float32)
    if rng.random() < 0.2:
        options["sinks"] = rng.standard_normal(num_heads).astype(np.float32)
    return options
