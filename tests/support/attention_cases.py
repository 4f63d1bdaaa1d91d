"""Seeded random attention problems in numpy, poisoned where nobody may look, and the tolerance of all operations.

The arrays are numpy's (with ml_dtypes for bfloat16 and fp8), so that the same case runs through the reference, the
CPU operations, the Triton kernels and the JAX operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch

from tests.support import reference
from torch_core import ops
from torch_core.base.specs import AttentionSpec

__all__ = [
    "DTYPES",
    "AttentionCase",
    "assert_as_exact",
    "assert_matches_reference",
    "dense_case",
    "paged_case",
    "random_dense_case",
    "random_paged_case",
    "to_torch",
    "with_dropout",
]

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
}
_TABLE_GARBAGE = (-1, 1 << 30, (1 << 31) - 1, -(1 << 31))


@dataclass(frozen=True)
class AttentionCase:
    """One attention problem.

    Attributes:
        seed: what it was made from.
        spec: the static options.
        operands: the positional arrays of the operation by name, in order.
        options: the optional arrays and numbers by name; what is absent is not set.
        limits: `max_query_len`, and `max_key_len` for dense attention.
        paged: whether the operation is `paged_attention` rather than `attention`.
    """

    seed: int
    spec: AttentionSpec
    operands: dict[str, np.ndarray]
    limits: dict[str, int]
    paged: bool
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def query_dtype(self) -> torch.dtype:
        """The dtype of the query and so of the output."""
        return to_torch(self.operands["query"][:0]).dtype

    def tensors(self, device: str = "cpu") -> dict[str, Any]:
        """Returns operands and options as torch tensors on `device`."""
        arrays = {**self.operands, **self.options}
        return {name: to_torch(x, device) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}

    def run(self, function: Callable[..., Any], device: str = "cpu", **changes: Any) -> Any:
        """Calls an operation of `torch_core` with this case; `changes` replace or add arguments."""
        return function(**{**self.tensors(device), "spec": self.spec, **self.limits, **changes})

    def call(self, device: str = "cpu", **changes: Any) -> Any:
        """Returns the call that `run` would make."""
        return self.run(ops.paged_call if self.paged else ops.dense_call, device, **changes)

    def expected(self, compute_dtype: torch.dtype | None = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the reference's output and lse."""
        function = reference.paged_attention_with_lse if self.paged else reference.attention_with_lse
        return self.run(function, compute_dtype=compute_dtype)

    def with_longest_query(self, tokens: int) -> AttentionCase:
        """Returns the same problem, stated to have queries of up to `tokens`, and a table of at least as many keys."""
        operands = dict(self.operands)
        if self.paged:
            table, block_size = operands["block_tables"], operands["kv_cache"].shape[2]
            columns = max(0, -(-tokens // block_size) - table.shape[1])
            operands["block_tables"] = np.pad(table, ((0, 0), (0, columns)), constant_values=_TABLE_GARBAGE[0])
        return replace(self, operands=operands, limits={**self.limits, "max_query_len": tokens})

    def lse_terms(self) -> float:
        """Returns how large a log-sum-exp would be if the products that add up to its scores did not cancel."""
        magnitudes = {
            name: np.abs(x.astype(np.float32)).astype(x.dtype) if name in ("query", "key", "kv_cache") else x
            for name, x in self.operands.items()
        }
        lse = replace(self, operands=magnitudes).expected()[1]
        return float(lse[lse.isfinite()].abs().max()) if lse.isfinite().any() else 0.0


def to_torch(array: np.ndarray, device: str = "cpu") -> torch.Tensor:
    """Returns a copy of a numpy array as a tensor, ml_dtypes included."""
    names = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
    array = np.array(array, order="C")
    if array.dtype.name in names:
        bits = torch.from_numpy(array.view(f"i{array.dtype.itemsize}"))
        return bits.view(names[array.dtype.name]).to(device)
    return torch.from_numpy(array).to(device)


def paged_case(
    seed: int,
    *,
    seq_lens: list[int],
    query_lens: list[int],
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_size: int = 32,
    block_size: int = 16,
    dtype: str = "float32",
    cache_dtype: str | None = None,
    spec: AttentionSpec | None = None,
    padding_tokens: int = 0,
    values: str = "gaussian",
    poison: float = np.nan,
    **options: Any,
) -> AttentionCase:
    """Makes a paged problem with shuffled blocks and poison in every slot, table entry and query row not in use.

    Blocks that a window or a chunk hides from all rows of their sequence are dropped: their table entry becomes the
    null block 0.

    Args:
        seed: of all random numbers.
        seq_lens: tokens of each sequence, new ones included.
        query_lens: new tokens of each sequence.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_size: elements of a head.
        block_size: tokens of a block.
        dtype: of the query.
        cache_dtype: of the cache; None for the query's.
        spec: the static options; None for plain causal attention.
        padding_tokens: query rows after the last sequence.
        values: "gaussian", "sparse" (mostly zeros and small integers, exact in any dtype) or "large" (big logits).
        poison: what unused slots and padding rows hold, for float dtypes; int8 has 127 there.
        options: optional arguments of the operation.
    """
    rng = np.random.default_rng(seed)
    cache_type = DTYPES[cache_dtype or dtype]
    spec = spec or AttentionSpec(scale=head_size**-0.5)
    used = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(used) + 3
    free = (rng.permutation(num_blocks - 1) + 1).tolist()
    kv_cache = np.full((num_blocks, 2, block_size, num_kv_heads, head_size), 127 if cache_dtype == "int8" else poison)
    block_tables = rng.choice(np.array(_TABLE_GARBAGE), (len(seq_lens), max(used, default=0) + 2))
    for seq, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        hidden = 0 if "mm_prefix_range" in options else _hidden_keys(seq_len, query_len, spec)
        for column in range(used[seq]):
            tokens = min(block_size, seq_len - column * block_size)
            if (column + 1) * block_size <= hidden:
                block_tables[seq, column] = 0
                continue
            block_tables[seq, column] = block = free.pop()
            first = max(0, hidden - column * block_size)
            live = _random(rng, (2, tokens - first, num_kv_heads, head_size), values)
            kv_cache[block, :, first:tokens] = np.clip(live * 40, -127, 127).round() if cache_dtype == "int8" else live
    num_tokens = sum(query_lens)
    query = _random(rng, (num_tokens + padding_tokens, num_heads, head_size), values)
    query[num_tokens:] = poison
    return AttentionCase(
        seed=seed,
        spec=spec,
        operands={
            "query": query.astype(DTYPES[dtype]),
            "kv_cache": kv_cache.astype(cache_type),
            "block_tables": block_tables.astype(np.int32),
            "seq_lens": np.array(seq_lens, np.int32),
            "query_start_loc": np.cumsum([0, *query_lens], dtype=np.int32),
        },
        limits={"max_query_len": max(query_lens, default=0)},
        paged=True,
        options=options,
    )


def dense_case(
    seed: int,
    *,
    key_lens: list[int],
    query_lens: list[int],
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_size: int = 32,
    value_head_size: int | None = None,
    dtype: str = "float32",
    spec: AttentionSpec | None = None,
    padding_tokens: int = 0,
    values: str = "gaussian",
    **options: Any,
) -> AttentionCase:
    """Makes a dense problem; the arguments are those of `paged_case`. Rows after the last sequence hold NaN."""
    rng = np.random.default_rng(seed)
    spec = spec or AttentionSpec(scale=head_size**-0.5)
    starts = {"query": np.cumsum([0, *query_lens]), "key": np.cumsum([0, *key_lens])}
    shapes = {
        "query": (starts["query"][-1], num_heads, head_size),
        "key": (starts["key"][-1], num_kv_heads, head_size),
        "value": (starts["key"][-1], num_kv_heads, value_head_size or head_size),
    }
    operands = {}
    for name, (rows, heads, size) in shapes.items():
        array = np.full((rows + padding_tokens, heads, size), np.nan)
        array[:rows] = _random(rng, (rows, heads, size), values)
        operands[name] = array.astype(DTYPES[dtype])
    operands["query_start_loc"] = starts["query"].astype(np.int32)
    operands["key_start_loc"] = starts["key"].astype(np.int32)
    limits = {"max_query_len": max(query_lens, default=0), "max_key_len": max(key_lens, default=0)}
    return AttentionCase(seed=seed, spec=spec, operands=operands, limits=limits, paged=False, options=options)


def random_paged_case(
    seed: int,
    *,
    max_seq_len: int = 150,
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16"),
    cache_dtypes: tuple[str, ...] = ("float8_e4m3fn", "float8_e5m2", "int8"),
    per_token_head: bool = True,
    rare: bool = True,
) -> AttentionCase:
    """Draws a paged problem: sizes, dtypes and every feature from the seed.

    Args:
        seed: of everything.
        max_seq_len: the longest sequence.
        dtypes: query dtypes to draw from.
        cache_dtypes: quantised cache dtypes to draw from, besides the query's own.
        per_token_head: allow scales per token and head.
        rare: allow `mm_prefix_range`, `qq_bias`, `relative_bias` and `seq_causal`.
    """
    rng = np.random.default_rng([seed, 1])
    sizes = _random_sizes(rng)
    num_seqs = int(rng.integers(1, 6))
    edges = [1, 2, 15, 16, 17, 63, 64, 65, max_seq_len]
    seq_lens = [
        int(rng.choice(edges)) if rng.random() < 0.5 else int(rng.integers(0, max_seq_len)) for _ in range(num_seqs)
    ]
    query_lens = [min(n, int(rng.choice([0, 1, 1, 1, 2, 5, n]))) for n in seq_lens]
    block_size = int(rng.choice([1, 4, 16, 16, 20, 32]))
    dtype = str(rng.choice(dtypes))
    cache_dtype = str(rng.choice(cache_dtypes)) if cache_dtypes and rng.random() < 0.3 else dtype
    options = _random_options(rng, sizes["num_heads"], num_seqs, max(query_lens), max_seq_len, rare)
    if cache_dtype != dtype or rng.random() < 0.2:
        unit = 0.025 if cache_dtype == "int8" else 1.0
        options["k_scale"] = float(rng.uniform(0.5, 2.0)) * unit
        options["v_scale"] = np.array([rng.uniform(0.5, 2.0) * unit], np.float32)
    case = paged_case(
        seed,
        seq_lens=seq_lens,
        query_lens=query_lens,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        spec=_random_spec(rng, sizes["head_size"], max_seq_len),
        padding_tokens=int(rng.integers(0, 3)),
        values="sparse" if rng.random() < 0.25 else "gaussian",
        **sizes,
        **options,
    )
    if per_token_head and np.dtype(DTYPES[cache_dtype]).itemsize == 1 and rng.random() < 0.4:
        del case.options["k_scale"], case.options["v_scale"]
        poisoned = _poisoned_slots(case)
        for name in ("k_scale_cache", "v_scale_cache"):
            scales = rng.uniform(0.01, 0.05, case.operands["kv_cache"].shape[:1] + case.operands["kv_cache"].shape[2:4])
            scales[poisoned] = np.nan
            case.options[name] = scales.astype(np.float32)
    return case


def random_dense_case(
    seed: int,
    *,
    max_len: int = 100,
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16"),
    rare: bool = True,
) -> AttentionCase:
    """Draws a dense problem: self attention, cross attention, encoders, windows, other value head sizes."""
    rng = np.random.default_rng([seed, 2])
    sizes = _random_sizes(rng)
    num_seqs = int(rng.integers(1, 5))
    query_lens = [int(rng.integers(0, max_len)) for _ in range(num_seqs)]
    crossed = rng.random() < 0.4
    key_lens = [int(rng.integers(0, max_len)) for _ in range(num_seqs)] if crossed else query_lens
    return dense_case(
        seed,
        key_lens=key_lens,
        query_lens=query_lens,
        value_head_size=int(rng.choice([16, 24])) if rng.random() < 0.2 else None,
        dtype=str(rng.choice(dtypes)),
        spec=_random_spec(rng, sizes["head_size"], max_len),
        padding_tokens=int(rng.integers(0, 3)),
        **sizes,
        **_random_options(rng, sizes["num_heads"], num_seqs, max(query_lens), max_len, rare),
    )


def with_dropout(case: AttentionCase, rate: float) -> AttentionCase:
    """Returns a dense problem that drops weights, by seeds of its own."""
    num_seqs, num_heads = case.operands["query_start_loc"].shape[0] - 1, case.operands["query"].shape[1]
    rng = np.random.default_rng([case.seed, 17])
    seeds = rng.integers(-(1 << 31), 1 << 31, (num_seqs, num_heads, 2)).astype(np.int32)
    return replace(case, options={**case.options, "dropout_rate": rate, "dropout_seeds": seeds})


def assert_as_exact(
    actual: torch.Tensor,
    exact: torch.Tensor,
    same_dtype: torch.Tensor,
    dtype: torch.dtype,
    what: str = "output",
    terms: float = 0.0,
) -> None:
    """Fails unless `actual` is at most twice as far from `exact` as a plain torch computation in `dtype` may be.

    The bound is 2 x (max |same_dtype - exact| + eps x max |exact|). Infinities must be the same, NaN must not occur. A
    gradient is a difference whose terms may be larger than itself (where a row sees one key, it is 0), and so is a
    score: then eps counts of them. Where the plain computation overflows (float16 scores before their scale, which
    kernels sum in float32), the bound is that of the other elements.

    Args:
        actual: what is tested.
        exact: the float64 reference.
        same_dtype: the reference computed in `dtype`.
        dtype: whose eps counts.
        what: named in the message.
        terms: the size of the terms whose difference it is.
    """
    actual, exact, same_dtype = (x.detach().cpu().double() for x in (actual, exact, same_dtype))
    assert actual.shape == exact.shape, f"{what} has shape {list(actual.shape)}, not {list(exact.shape)}"
    infinite = exact.isinf()
    assert torch.equal(actual[infinite], exact[infinite]), f"{what} differs where the reference is infinite"
    if infinite.all():
        return
    rounding = torch.finfo(dtype).eps * exact[~infinite].abs().max().clamp(min=terms)
    plain = (same_dtype - exact)[~infinite].abs()
    bound = 2 * (plain[plain.isfinite()].max() + rounding)
    error = (actual - exact)[~infinite].abs().max()
    assert error <= bound, f"{what} is off by {error:.3e}; the bound is {bound:.3e}"


def assert_matches_reference(case: AttentionCase, output: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """Fails unless an operation's result for `case` is as exact as `assert_as_exact` demands."""
    dtype = case.query_dtype if case.query_dtype.itemsize > 1 else torch.bfloat16
    exact, exact_lse = case.expected()
    same, same_lse = case.expected(dtype)
    assert_as_exact(output, exact, same, dtype, f"output of case {case.seed}")
    if lse is not None:
        what, terms = f"lse of case {case.seed}", case.lse_terms()
        assert_as_exact(lse, exact_lse, same_lse, torch.float32, what, terms)


def _hidden_keys(seq_len: int, query_len: int, spec: AttentionSpec) -> int:
    """Returns how many leading keys no query row sees."""
    first = max(0, seq_len - query_len)
    if query_len == 0:
        return seq_len
    hidden = 0
    if spec.window_left is not None:
        hidden = max(hidden, first - spec.window_left)
    if spec.attention_chunk is not None:
        hidden = max(hidden, first // spec.attention_chunk * spec.attention_chunk)
    return hidden


def _poisoned_slots(case: AttentionCase) -> np.ndarray:
    """Returns bool `[num_blocks, block_size]`: slots that no sequence has a token in."""
    cache, tables = case.operands["kv_cache"], case.operands["block_tables"]
    block_size = cache.shape[2]
    poisoned = np.ones((cache.shape[0], block_size), bool)
    for seq, seq_len in enumerate(case.operands["seq_lens"].tolist()):
        for token in range(seq_len):
            poisoned[tables[seq, token // block_size], token % block_size] = False
    poisoned[0] = True
    return poisoned


def _random(rng: np.random.Generator, shape: tuple[int, ...], values: str) -> np.ndarray:
    if values == "sparse":
        return rng.choice(np.array([0.0, 0.0, 0.0, 1.0, -1.0, 2.0]), shape)
    factor = {"gaussian": 1.0, "large": 30.0}[values]
    return np.clip(rng.standard_normal(shape), -4, 4) * factor


def _random_sizes(rng: np.random.Generator) -> dict[str, int]:
    num_kv_heads = int(rng.choice([1, 2, 3]))
    return {
        "num_kv_heads": num_kv_heads,
        "num_heads": num_kv_heads * int(rng.choice([1, 2, 3, 4, 8])),
        "head_size": int(rng.choice([16, 32, 40, 64])),
    }


def _random_spec(rng: np.random.Generator, head_size: int, max_len: int) -> AttentionSpec:
    window = [0, 1, 7, 16, 33, max_len]
    return AttentionSpec(
        scale=head_size**-0.5,
        causal=bool(rng.random() < 0.7),
        window_left=int(rng.choice(window)) if rng.random() < 0.3 else None,
        window_right=int(rng.choice(window)) if rng.random() < 0.2 else None,
        logits_soft_cap=float(rng.uniform(1, 20)) if rng.random() < 0.2 else None,
        attention_chunk=int(rng.choice([1, 5, 16, 40])) if rng.random() < 0.15 else None,
        use_alibi_sqrt=bool(rng.random() < 0.4),
    )


def _random_options(
    rng: np.random.Generator, num_heads: int, num_seqs: int, max_query_len: int, max_len: int, rare: bool
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.25:
        options["alibi_slopes"] = rng.uniform(0.01, 0.5, num_heads).astype(np.float32)
    if rng.random() < 0.25:
        options["sinks"] = rng.standard_normal(num_heads).astype(np.float32)
    if rare and rng.random() < 0.15:
        ranges = np.sort(rng.integers(0, max_len, (num_seqs, 2, 2)), axis=-1)
        ranges[:, 1] *= rng.random((num_seqs, 1)) < 0.5
        options["mm_prefix_range"] = ranges.astype(np.int32)
    if rare and rng.random() < 0.15:
        bias = rng.standard_normal((max_query_len, max_query_len)).astype(np.float32)
        bias[rng.random(bias.shape) < 0.3] = -np.inf
        np.fill_diagonal(bias, 0)
        options["qq_bias"] = bias
    if rare and rng.random() < 0.15:
        options["seq_causal"] = rng.random(num_seqs) < 0.5
    if rare and rng.random() < 0.15:
        options["relative_bias"] = rng.standard_normal((num_heads, 2 * int(rng.integers(0, 20)) + 1)).astype(np.float32)
    return options
