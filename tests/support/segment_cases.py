"""Random rows of packed segments, with padding before, between and after them that may hold anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.support.attention_cases import AttentionCase, assert_matches_reference, dense_case, to_torch
from tests.support.backward_cases import assert_gradients_match, backward_call
from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.base.specs import AttentionSpec

__all__ = ["assert_padded_match", "padded", "padded_backward", "random_segment_case", "segment_case"]


def segment_case(
    seed: int, rows: list[list[int]], *, key_rows: list[list[int]] | None = None, **options: Any
) -> AttentionCase:
    """Makes a dense problem whose rows hold segments of these lengths; a negative one is padding.

    Ids are any numbers, equal in different rows. With `key_rows` the keys have lengths of their own. The other options
    are those of `dense_case`. Padding holds zeros; see `padded`.
    """
    rng = np.random.default_rng([seed, 23])
    ids = {"segment_ids": [_ids(row, rng.permutation(50) + 1) for row in rows]}
    if key_rows is not None:
        rng = np.random.default_rng([seed, 23])
        ids["key_segment_ids"] = [_ids(row, rng.permutation(50) + 1) for row in key_rows]
    query_lens, key_lens = ([len(row) for row in side] for side in (ids["segment_ids"], [*ids.values()][-1]))
    tail = np.zeros(options.get("padding_tokens", 0), np.int32)
    arrays: dict[str, Any] = {name: np.concatenate([*each, tail]).astype(np.int32) for name, each in ids.items()}
    case = dense_case(seed, query_lens=query_lens, key_lens=key_lens, **options, **arrays)
    return _filled(case, 0.0)


def random_segment_case(seed: int, *, longest: int = 40, **fixed: Any) -> AttentionCase:
    """Draws rows of segments with windows, chunks, caps, sinks, slopes and groups, and cross attention."""
    rng = np.random.default_rng([seed, 29])
    num_rows, crossed = int(rng.integers(1, 4)), rng.random() < 0.25
    counts = [int(rng.integers(1, 5)) for _ in range(num_rows)]
    rows, key_rows = (
        [_with_padding([int(rng.integers(1, longest)) for _ in range(n)], rng) for n in counts] for _ in range(2)
    )
    num_heads = fixed.get("num_heads", int(rng.choice([2, 4])))
    causal = bool(rng.random() < 0.7)
    options: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": int(rng.choice([1, 2])),
        "head_size": 16,
        "dtype": str(rng.choice(["float32", "bfloat16"])),
        "spec": AttentionSpec(
            scale=0.25,
            causal=causal,
            window_left=int(rng.choice([0, 5, 20])) if rng.random() < 0.3 else None,
            window_right=int(rng.choice([0, 9])) if not causal and rng.random() < 0.4 else None,
            attention_chunk=int(rng.choice([4, 16])) if rng.random() < 0.2 else None,
            logits_soft_cap=2.0 if rng.random() < 0.3 else None,
        ),
        "padding_tokens": int(rng.choice([0, 3])),
        # Padding between two of four segments counts as two.
        "max_segments": 10,
    }
    if rng.random() < 0.3:
        options["sinks"] = rng.standard_normal(num_heads).astype(np.float32)
    if rng.random() < 0.3:
        options["alibi_slopes"] = rng.uniform(0.01, 0.3, num_heads).astype(np.float32)
    return segment_case(seed, rows, key_rows=key_rows if crossed else None, **{**options, **fixed})


def padded(case: AttentionCase) -> AttentionCase:
    """Returns a case with NaN in all padding of queries, keys and values."""
    return _filled(case, np.nan)


def padded_backward(case: AttentionCase, forward: Any, device: str = "cpu") -> DenseBackwardCall[torch.Tensor]:
    """Returns the backward call of the `padded` form of a case; gradients of padding are NaN too."""
    call = backward_call(padded(case), forward, device, with_d_lse=bool(case.seed % 2))
    padding = to_torch(case.options["segment_ids"] <= 0, device)
    gradients = {name: x for name in ("d_out", "d_lse") if (x := getattr(call, name)) is not None}
    for gradient in gradients.values():
        gradient[padding] = torch.nan
    return call


def assert_padded_match(
    case: AttentionCase, call: DenseBackwardCall[torch.Tensor], found: dict[str, torch.Tensor]
) -> None:
    """Fails unless the results and gradients of the padded form of a case are those of the case, and 0 in padding."""
    assert call.out is not None
    assert_matches_reference(case, call.out.cpu(), call.lse.cpu())
    found = {name: x.cpu() for name, x in found.items()}
    queries = torch.from_numpy(case.options["segment_ids"] <= 0)
    keys = torch.from_numpy(case.options.get("key_segment_ids", case.options["segment_ids"]) <= 0)
    for name, padding in (("d_query", queries), ("d_key", keys), ("d_value", keys)):
        assert not found[name][padding].any()
    clean = call.map(torch.Tensor.cpu)
    clean = clean.with_arrays({name: to_torch(case.operands[name]) for name in ("query", "key", "value")})
    gradients = {name: x for name in ("d_out", "d_lse") if (x := getattr(clean, name)) is not None}
    clean = clean.with_arrays({name: x.nan_to_num(0.0) for name, x in gradients.items()})
    assert_gradients_match(clean, found, f"case {case.seed}")


def _ids(row: list[int], names: np.ndarray) -> np.ndarray:
    found, used = [], iter(names.tolist())
    for length in row:
        found += [next(used)] * length if length > 0 else [0, -1][length % 2 :][:1] * -length
    return np.array(found, np.int32)


def _with_padding(lens: list[int], rng: np.random.Generator) -> list[int]:
    found = [-int(rng.integers(1, 6))] if rng.random() < 0.3 else []
    for length in lens:
        found.append(length)
        if rng.random() < 0.3:
            found.append(-int(rng.integers(1, 6)))
    return found


def _filled(case: AttentionCase, content: float) -> AttentionCase:
    operands = dict(case.operands)
    key_ids = case.options.get("key_segment_ids", case.options["segment_ids"])
    for name, ids in (("query", case.options["segment_ids"]), ("key", key_ids), ("value", key_ids)):
        operands[name] = operands[name].copy()
        operands[name][ids <= 0] = content
    return replace(case, operands=operands)
