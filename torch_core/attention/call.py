"""AttentionCall: the operands and options of one attention call, checked once and shared by its launches."""

from __future__ import annotations

from dataclasses import dataclass

from torch_core.errors import InvalidInput, Unsupported
from torch_core.plan.operands import ScaleSpec, check_last_stride, power_of_two, scale_inputs
from torch_core.plan.plan import ArraySpec, DeviceLimits
from torch_core.specs import DTYPE_BYTES, QUERY_DTYPES, AttentionSpec

__all__ = ["OUTPUT_LIMITS", "SUPPORT", "AttentionCall", "keys_of"]

#: Largest finite value of each 8-bit output type.
OUTPUT_LIMITS = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_FLOAT8 = tuple(OUTPUT_LIMITS)
_MAX_HEAD_SIZE = 256
_MAX_BLOCK_SIZE = 256

#: What the Triton attention kernels take: (feature, paged attention, dense attention). The README prints it.
SUPPORT: tuple[tuple[str, str, str], ...] = (
    ("query dtype", "float32, bfloat16, float16; fp8 (e4m3, e5m2) with q_scale", "float32, bfloat16, float16"),
    ("key/value dtype", "the query's, or fp8 e4m3, fp8 e5m2, int8 with any query", "the query's"),
    ("scales of keys and values", "per tensor (number or array); per token and head", "no"),
    ("head size", "1 to 256, padded to a power of two inside; values may differ (pair of caches)", "the same"),
    ("query heads per key/value head", "any", "any"),
    ("block size", "1 to 256", "-"),
    ("strides", "any, last axis contiguous", "any, last axis contiguous"),
    ("causal, window_left, window_right, attention_chunk", "yes, together too", "yes, together too"),
    ("causal flag per sequence (seq_causal)", "yes", "yes"),
    ("bidirectional ranges (mm_prefix_range)", "yes; every tile is masked", "yes; every tile is masked"),
    ("query-query bias (qq_bias)", "yes", "yes"),
    ("logits_soft_cap, ALiBi, ALiBi-sqrt, sinks", "yes, together too", "yes, together too"),
    ("log-sum-exp output", "float32, natural logarithm", "float32, natural logarithm"),
    ("output dtype", "the query's; bfloat16 for an fp8 query; fp8 with out_scale", "the same"),
)


def keys_of(kv_cache: ArraySpec) -> ArraySpec:
    """Returns the keys of a combined cache [num_blocks, 2, ...] as an array of their own; the values have its shape."""
    shape, strides = kv_cache.shape, kv_cache.element_strides
    return ArraySpec((shape[0], *shape[2:]), kv_cache.dtype, (strides[0], *strides[2:]), kv_cache.aligned)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One attention call by shapes, dtypes and options.

    Attributes:
        query: [num_tokens, num_heads, head_size].
        key: the key cache [num_blocks, block_size, num_kv_heads, head_size], or dense keys
            [num_keys, num_kv_heads, head_size]; for a combined cache, the view of its keys.
        value: the same for values; the head size may differ.
        kv_cache: the array [num_blocks, 2, ...] of which key and value are views; None when they are arrays.
        query_start_loc: int32 [num_seqs + 1].
        block_tables: int32 [num_seqs, max_blocks] when paged.
        seq_lens: int32 [num_seqs] when paged.
        key_start_loc: int32 [num_seqs + 1] when dense.
        spec: the static options.
        max_query_len: an upper bound on the query lengths.
        out: dtype and strides of the output; the strides are None for a contiguous one.
        with_lse: the log-sum-exp is wanted.
        limits: the device.
        q_scale: what one unit of the query is worth: a number, a one-element float32 array, or None.
        k_scale: the same for keys.
        v_scale: the same for values.
        out_scale: what one unit of the output is worth; for an fp8 output.
        alibi_slopes: float [num_heads].
        sinks: float [num_heads].
        key_scales: float32 [num_blocks, block_size, num_kv_heads], a scale per token and head.
        value_scales: the same, with the same strides.
        mm_prefix_range: int32 [num_seqs, ranges, 2].
        qq_bias: float [rows, rows].
        seq_causal: bool or int [num_seqs].
    """

    query: ArraySpec
    key: ArraySpec
    value: ArraySpec
    query_start_loc: ArraySpec
    spec: AttentionSpec
    max_query_len: int
    out: ArraySpec
    with_lse: bool
    limits: DeviceLimits
    kv_cache: ArraySpec | None = None
    block_tables: ArraySpec | None = None
    seq_lens: ArraySpec | None = None
    key_start_loc: ArraySpec | None = None
    q_scale: ScaleSpec = None
    k_scale: ScaleSpec = None
    v_scale: ScaleSpec = None
    out_scale: ScaleSpec = None
    alibi_slopes: ArraySpec | None = None
    sinks: ArraySpec | None = None
    key_scales: ArraySpec | None = None
    value_scales: ArraySpec | None = None
    mm_prefix_range: ArraySpec | None = None
    qq_bias: ArraySpec | None = None
    seq_causal: ArraySpec | None = None

    def __post_init__(self) -> None:
        self._check_shapes()
        self._check_dtypes()
        self._check_extras()

    @property
    def paged(self) -> bool:
        """Keys are found through block tables."""
        return self.block_tables is not None

    @property
    def num_tokens(self) -> int:
        """Query rows, padding included."""
        return self.query.shape[0]

    @property
    def num_seqs(self) -> int:
        """Sequences, padding included."""
        return self.query_start_loc.shape[0] - 1

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.key.shape[-2]

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_padded(self) -> int:
        """Key head size as a tile has it."""
        return max(16, power_of_two(self.key.shape[-1]))

    @property
    def value_padded(self) -> int:
        """Value head size as a tile has it."""
        return max(16, power_of_two(self.value.shape[-1]))

    @property
    def block_size(self) -> int:
        """Tokens of a block; 1 for dense keys."""
        return self.key.shape[1] if self.paged else 1

    @property
    def table_tokens(self) -> int:
        """Tokens that one row of the block tables can hold; 0 for dense keys."""
        return self.block_tables.shape[1] * self.block_size if self.block_tables is not None else 0

    @property
    def plain(self) -> bool:
        """Scores are only scaled and masked, by bounds that are the same for every row."""
        extras = (self.alibi_slopes, self.qq_bias, self.mm_prefix_range, self.key_scales, self.spec.logits_soft_cap)
        return all(extra is None for extra in extras)

    @property
    def value_offset(self) -> int:
        """Elements from the start of the value buffer to its first value."""
        return 0 if self.kv_cache is None else self.kv_cache.element_strides[1]

    @property
    def inputs(self) -> tuple[tuple[str, ArraySpec], ...]:
        """Every array that the caller gives, by buffer name."""
        if self.kv_cache is not None:
            caches = (("kv_cache", self.kv_cache),)
        else:
            caches = tuple(zip(self.buffers, (self.key, self.value), strict=True))
        optional = (
            ("block_tables", self.block_tables),
            ("seq_lens", self.seq_lens),
            ("query_start_loc", self.query_start_loc),
            ("key_start_loc", self.key_start_loc),
            ("alibi_slopes", self.alibi_slopes),
            ("sinks", self.sinks),
            ("k_scale_cache", self.key_scales),
            ("v_scale_cache", self.value_scales),
            ("mm_prefix_range", self.mm_prefix_range),
            ("qq_bias", self.qq_bias),
            ("seq_causal", self.seq_causal),
        )
        scales = scale_inputs(
            q_scale=self.q_scale, k_scale=self.k_scale, v_scale=self.v_scale, out_scale=self.out_scale
        )
        given = tuple((name, spec) for name, spec in optional if spec is not None)
        return (("query", self.query), *caches, *given, *scales)

    @property
    def buffers(self) -> tuple[str, str]:
        """Buffer names of keys and values."""
        if self.kv_cache is not None:
            return "kv_cache", "kv_cache"
        return ("key_cache", "value_cache") if self.paged else ("key", "value")

    def _check_shapes(self) -> None:
        if len(self.query.shape) != 3:
            raise InvalidInput(
                f"query has shape {list(self.query.shape)}; it must be [num_tokens, num_heads, head_size]."
            )
        rank = 4 if self.paged else 3
        for name, array in (("key", self.key), ("value", self.value)):
            if len(array.shape) != rank:
                raise InvalidInput(f"{name} has shape {list(array.shape)}; it must have {rank} axes, head size last.")
        if self.key.shape[:-1] != self.value.shape[:-1]:
            raise InvalidInput(
                f"key has shape {list(self.key.shape)} and value {list(self.value.shape)}; only head sizes may differ."
            )
        if self.query.shape[2] != self.key.shape[-1]:
            raise InvalidInput(
                f"query has head size {self.query.shape[2]} and key {self.key.shape[-1]}; they must agree."
            )
        if self.num_kv_heads == 0 or self.num_heads % self.num_kv_heads:
            raise InvalidInput(
                f"query has {self.num_heads} heads and key {self.num_kv_heads}; the first must be a multiple."
            )
        for name, array in (("query", self.query), ("key", self.key), ("value", self.value), ("out", self.out)):
            check_last_stride(name, array)
        for name, array in (("key", self.key), ("value", self.value)):
            if not 1 <= array.shape[-1] <= _MAX_HEAD_SIZE:
                raise Unsupported(
                    f"{name} has head size {array.shape[-1]}; the Triton kernels take 1 to {_MAX_HEAD_SIZE}; use "
                    "implementation='xla' or 'torch'."
                )
        if self.paged and not 1 <= self.block_size <= _MAX_BLOCK_SIZE:
            raise Unsupported(f"block_size is {self.block_size}; the Triton kernels take 1 to {_MAX_BLOCK_SIZE}.")
        if self.max_query_len < 0:
            raise InvalidInput(f"max_query_len is {self.max_query_len}; it must not be negative.")
        if self.out.shape != (*self.query.shape[:2], self.value.shape[-1]):
            raise InvalidInput(
                f"out has shape {list(self.out.shape)}; it must be {[*self.query.shape[:2], self.value.shape[-1]]}."
            )
        self._check_lengths()

    def _check_lengths(self) -> None:
        blocks = self.block_tables.shape[1:] if self.block_tables is not None else ()
        lengths = {
            "query_start_loc": (self.query_start_loc, (self.num_seqs + 1,)),
            "seq_lens": (self.seq_lens, (self.num_seqs,)),
            "key_start_loc": (self.key_start_loc, (self.num_seqs + 1,)),
            "block_tables": (self.block_tables, (self.num_seqs, *blocks)),
        }
        for name, (array, shape) in lengths.items():
            if array is None:
                continue
            if array.dtype != "int32":
                raise InvalidInput(f"{name} is {array.dtype}; it must be int32.")
            if array.shape != shape:
                raise InvalidInput(
                    f"{name} has shape {list(array.shape)}; it must be {list(shape)} for {self.num_seqs} sequences."
                )
            if array.size and array.element_strides[-1] != 1:
                raise InvalidInput(f"{name} has strides {array.element_strides}; the last one must be 1.")

    def _check_dtypes(self) -> None:
        query, key, value, out = self.query.dtype, self.key.dtype, self.value.dtype, self.out.dtype
        if key != value:
            raise Unsupported(f"keys are {key} and values {value}; the Triton kernels take one dtype for both.")
        if query not in QUERY_DTYPES and not (self.paged and query in _FLOAT8):
            raise Unsupported(
                f"query is {query}; the Triton kernels take {', '.join(QUERY_DTYPES)}, and fp8 when paged."
            )
        if key not in (*_FLOAT8, "int8") and key not in (query, *(("float16", "bfloat16") if query in _FLOAT8 else ())):
            raise Unsupported(
                f"query is {query} and keys are {key}; cast one, or keep the keys in the query's dtype, fp8 or int8."
            )
        if not self.paged and DTYPE_BYTES[key] == 1:
            raise Unsupported(f"dense keys are {key}; 8-bit keys need a paged cache.")
        if out not in (*QUERY_DTYPES, *_FLOAT8):
            raise Unsupported(f"out is {out}; it must be one of {', '.join((*QUERY_DTYPES, *_FLOAT8))}.")

    def _check_extras(self) -> None:
        for name, array in (("alibi_slopes", self.alibi_slopes), ("sinks", self.sinks)):
            if array is not None and (array.shape != (self.num_heads,) or array.strides is not None):
                raise InvalidInput(
                    f"{name} has shape {list(array.shape)}; it must be contiguous, one number for each of the "
                    f"{self.num_heads} query heads."
                )
        if (self.key_scales is None) != (self.value_scales is None):
            raise InvalidInput("k_scale_cache and v_scale_cache must be given together.")
        if self.key_scales is not None and self.value_scales is not None:
            for name, array in (("k_scale_cache", self.key_scales), ("v_scale_cache", self.value_scales)):
                if not self.paged or array.shape != self.key.shape[:-1] or array.dtype != "float32":
                    raise InvalidInput(
                        f"{name} is {array.dtype}{list(array.shape)}; it must be float32{list(self.key.shape[:-1])}."
                    )
            if self.key_scales.element_strides != self.value_scales.element_strides:
                raise Unsupported("k_scale_cache and v_scale_cache have different strides; give both the same layout.")
        ranges = self.mm_prefix_range
        if ranges is not None and (
            len(ranges.shape) != 3 or ranges.shape[0] != self.num_seqs or ranges.shape[2] != 2
            or ranges.dtype != "int32" or ranges.strides is not None
        ):  # fmt: skip
            raise InvalidInput(
                f"mm_prefix_range is {ranges.dtype}{list(ranges.shape)}; it must be contiguous "
                f"int32[{self.num_seqs}, ranges, 2]."
            )
        bias = self.qq_bias
        if bias is not None and (len(bias.shape) != 2 or bias.shape[0] != bias.shape[1] or bias.strides is not None):
            raise InvalidInput(f"qq_bias has shape {list(bias.shape)}; it must be contiguous and square.")
        flags = self.seq_causal
        if flags is not None and (flags.shape != (self.num_seqs,) or flags.strides is not None):
            raise InvalidInput(f"seq_causal has shape {list(flags.shape)}; it must be [{self.num_seqs}].")
