"""PagedCall and DenseCall: attention over a paged cache, and over packed keys and values."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace
from typing import ClassVar

from jaxtyping import Bool, Float, Float32, Int32, Shaped

from torch_core.attention.checks import check_caches, check_output, check_static, check_token_scales, even_axes
from torch_core.attention.dropout import check_rate
from torch_core.attention.options import MASK_OPTIONS, NO_MASK, attention_spec
from torch_core.attention.segments import SegmentFields
from torch_core.base.checks import check_bool
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import FP8_DTYPES, ArraySpec, AttentionSpec
from torch_core.launch.call import A, Call, dtype_name
from torch_core.launch.values import check_starts, check_tables

#: Arrays that add to a score.
BIAS_FIELDS = ("alibi_slopes", "relative_bias", "qq_bias")
#: Arrays that do more to a score than to hide it by bounds which all rows share.
SCORE_FIELDS = (*BIAS_FIELDS, "mm_prefix_range")


@dataclass(frozen=True, kw_only=True)
class AttentionCall(Call[A]):
    """The common fields of paged and dense attention.

    The attributes also describe the arguments of the public functions, of torch and JAX (`torch_core.launch.public`).

    Attributes:
        query: packed queries, one sequence after the other; rows from the last offset of query_start_loc on are
            padding. An fp8 query is multiplied by q_scale.
        query_start_loc: cumulative sum of the query lengths, starting with 0.
        alibi_slopes: one ALiBi slope for each query head: `slope * (key - query)` is added to the scores.
        sinks: one logit per query head that every softmax includes without a value; the lse includes it.
        mm_prefix_range: pairs (first, last position) of bidirectional attention: a query inside a pair sees every key
            inside it, even outside the other bounds. A pair with last <= first is empty.
        qq_bias: bias of the scores between a sequence's own new tokens (tree attention); -inf hides a key.
        relative_bias: bias of the scores by the distance of key and query, for each head (T5's buckets, expanded):
            entry `D + clip(key - query, -D, D)` of `2 * D + 1`; finite.
        seq_causal: for each sequence, overrides causal.
        out: array to write the result to; None allocates a new one.
        out_scale: scale of an fp8 output, which then holds `result / out_scale`, saturated.
        spec: scale, causal, sliding_window, logits_soft_cap, attention_chunk and use_alibi_sqrt as one object, instead
            of these.
        scale: factor on the scores; head_size ** -0.5 by default.
        causal: hide keys after the query.
        sliding_window: number W of visible tokens, the query's own included; as many to the right of sequences that are
            not causal. A pair (left, right) counts further tokens to each side. None for all.
        logits_soft_cap: cap on the scores, `cap * tanh(score / cap)`; None for off.
        attention_chunk: size of chunks in tokens; a query sees the keys of its own chunk only. None for off.
        use_alibi_sqrt: use the square-root form of ALiBi, `-slope * sqrt(query - key)`.
        max_query_len: upper bound on the query lengths, in tokens; it never changes a result.
        with_lse: also return the natural log-sum-exp of each row's scores, float32 [num_tokens, num_heads].
        out_dtype: element type of a new output; None for the query's, bfloat16 for an fp8 query.
        batch_invariant: take keys in the order of their positions, in tiles at multiples of one size: a query's bits
            depend on itself and the keys it sees alone, in any batch, chunk or form of the cache.
    """

    query: Float[A, "num_tokens num_heads head_size"]
    query_start_loc: Int32[A, "num_seqs+1"]
    alibi_slopes: Float[A, "num_heads"] | None = None
    sinks: Float[A, "num_heads"] | None = None
    mm_prefix_range: Int32[A, "num_seqs ranges 2"] | None = None
    qq_bias: Float[A, "bias_rows bias_rows"] | None = None
    relative_bias: Float[A, "num_heads distances"] | None = None
    seq_causal: Bool[A, "num_seqs"] | None = None
    out: Float[A, "num_tokens num_heads value_head_size"] | None = None
    out_scale: Float32[A, "1"] | float | None = None
    # None is replaced by a spec of the keywords that follow.
    spec: AttentionSpec = field(default=None)  # pyright: ignore[reportAssignmentType]
    scale: InitVar[float | None] = None
    causal: InitVar[bool] = True
    sliding_window: InitVar[int | tuple[int | None, int | None] | None] = None
    logits_soft_cap: InitVar[float | None] = None
    attention_chunk: InitVar[int | None] = None
    use_alibi_sqrt: InitVar[bool] = False
    max_query_len: int
    with_lse: bool = False
    out_dtype: str | None = None
    batch_invariant: bool = False

    def __post_init__(
        self,
        scale: float | None,
        causal: bool,
        sliding_window: int | tuple[int | None, int | None] | None,
        logits_soft_cap: float | None,
        attention_chunk: int | None,
        use_alibi_sqrt: bool,
    ) -> None:
        """Makes the spec, unless it is given, and checks the options that are numbers."""
        mask = (scale, causal, sliding_window, logits_soft_cap, attention_chunk, use_alibi_sqrt)
        if self.spec is None:
            spec = attention_spec(self.query, *mask)
            if self.seq_causal is not None and not isinstance(sliding_window, tuple):
                spec = replace(spec, window_right=spec.window_left)
            object.__setattr__(self, "spec", spec)
        elif mask != NO_MASK:
            raise InvalidInput("spec", "is given beside its parts", f"give spec or {', '.join(MASK_OPTIONS)}")
        self.check_statics()

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
        return self._keys_and_values()[0].shape[-2]

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Elements of a query or key head."""
        return self.query.shape[2]

    @property
    def value_head_size(self) -> int:
        """Elements of a value head, and so of an output row."""
        return self._keys_and_values()[1].shape[-1]

    @property
    def key_dtype(self) -> str:
        """Element type of keys and values."""
        return dtype_name(self._keys_and_values()[0])

    @property
    def result_dtype(self) -> str:
        """Element type of the output, whether it is given or new."""
        if self.out is not None:
            return dtype_name(self.out)
        query = dtype_name(self.query)
        return self.out_dtype or ("bfloat16" if query in FP8_DTYPES else query)

    @property
    def drops(self) -> bool:
        """Softmax weights are dropped."""
        return False

    @property
    def splits_sequences(self) -> bool:
        """They can."""
        return True

    def rows_of_a_sequence(self) -> dict[str, int]:
        """Returns `max_query_len` where all queries can have that length."""
        return even_axes(self.num_seqs, num_tokens=(self.num_tokens, self.max_query_len))

    @property
    def table_tokens(self) -> int:
        """Tokens that one row of the block tables can hold; 0 without tables."""
        return 0

    @property
    def block_size(self) -> int:
        """Tokens of a block; 1 without tables."""
        return 1

    @property
    def values_are_keys(self) -> bool:
        """A value is a part of its key, and has its scale."""
        return False

    @property
    def value_offset(self) -> int:
        """Elements from the start of the values' array to the first value, of a call of specs."""
        return 0

    def keys(self) -> ArraySpec:
        """Returns the keys of a call of specs, `[..., num_kv_heads, head_size]`: an array or a view of one."""
        raise NotImplementedError

    def values(self) -> ArraySpec:
        """Returns the values, as `keys` does; in their array they lie `value_offset` elements further."""
        raise NotImplementedError

    def buffers(self) -> tuple[str, str]:
        """Returns the names of the arrays that keys and values lie in."""
        raise NotImplementedError

    @property
    def sees_distances(self) -> str | None:
        """The parts of mask and bias, except the causal mask, that depend on a key's position; None without any."""
        spec = self.spec
        given = {
            "a sliding window": spec.window_left is not None or spec.window_right is not None,
            "attention_chunk": spec.attention_chunk is not None,
            "ALiBi": self.alibi_slopes is not None,
            "relative_bias": self.relative_bias is not None,
            "mm_prefix_range": self.mm_prefix_range is not None,
        }
        return next((name for name, is_given in given.items() if is_given), None)

    @property
    def is_empty(self) -> bool:
        """There is no query row or no sequence."""
        return self.num_tokens == 0 or self.num_seqs == 0

    @property
    def written(self) -> tuple[str, ...]:
        """The output, when it is given."""
        return () if self.out is None else ("out",)

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `out`, unless it is given, and `lse`, if it is wanted (float64 for a float64 query)."""
        found = {}
        if self.out is None:
            found["out"] = ArraySpec((self.num_tokens, self.num_heads, self.value_head_size), self.result_dtype)
        if self.with_lse:
            lse_dtype = "float64" if dtype_name(self.query) == "float64" else "float32"
            found["lse"] = ArraySpec((self.num_tokens, self.num_heads), lse_dtype)
        return found

    def check_statics(self) -> None:
        """Checks that the bound on the query lengths is an int."""
        check_static("max_query_len", self.max_query_len)
        check_bool("batch_invariant", self.batch_invariant)

    def check_options(self) -> None:
        """Checks heads, dtypes and options."""
        key, value = self._keys_and_values()
        key_name = "the key cache" if self.reads_cache else "key"
        if 0 in (self.num_heads, self.head_size, *key.shape[1:], *value.shape[1:]):
            wanted = "there must be at least one head, one element and one slot"
            raise InvalidInput("query", f"has shape {list(self.query.shape)} and {key_name} {list(key.shape)}", wanted)
        if self.num_heads % self.num_kv_heads:
            wanted = "the first must be a multiple of the second"
            raise InvalidInput("query", f"has {self.num_heads} heads and {key_name} {self.num_kv_heads}", wanted)
        if dtype_name(key) != dtype_name(value):
            raise InvalidInput(f"keys are {dtype_name(key)} and values {dtype_name(value)}; both must be of one dtype.")
        shape = (self.num_tokens, self.num_heads, self.value_head_size)
        check_output(self.out, shape, self.result_dtype, self.out_dtype, self.out_scale)
        if self.qq_bias is not None and self.qq_bias.shape[0] < self.max_query_len:
            wanted = f"both sides must be at least max_query_len = {self.max_query_len}"
            raise InvalidInput("qq_bias", f"has shape {list(self.qq_bias.shape)}", wanted)
        if self.relative_bias is not None and self.relative_bias.shape[1] % 2 == 0:
            wanted = "it must have an odd number of distances, from -D to D"
            raise InvalidInput("relative_bias", f"has shape {list(self.relative_bias.shape)}", wanted)

    def _keys_and_values(self) -> tuple[A, A]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TableCall(AttentionCall[A]):
    """Attention of new tokens to the cached tokens of their sequences.

    Query rows are the last tokens of their sequence; their keys and values are in the cache already. Table entries past
    a sequence's last block are never read.

    Attributes:
        block_tables: block ids of each sequence, in order; entries after its last block are never read.
        seq_lens: tokens of each sequence in the cache, including the new ones; 0 for a padding row.
        q_scale: dequantisation scale of an fp8 query; None for 1. In JAX a number is compiled in; an array is passed at
            run time.
        k_scale: dequantisation scale of stored keys; None for 1.
        kv_chunk_size: number of keys in one chunk of the split kernel, a power of two, at least 128; None for the tile
            table's. With a number, a sequence has the same bits in all tables and batches whose plans have the same
            tile, and long queries are not split.
    """

    block_tables: Int32[A, "num_seqs max_blocks"]
    seq_lens: Int32[A, "num_seqs"]
    q_scale: Float32[A, "1"] | float | None = None
    k_scale: Float32[A, "1"] | float | None = None
    kv_chunk_size: int | None = None

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._keys_and_values()[0].shape[-3]

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self._keys_and_values()[0].shape[0]

    @property
    def table_tokens(self) -> int:
        """Tokens that one row of the block tables can hold."""
        return self.block_tables.shape[1] * self.block_size

    @property
    def reads_cache(self) -> bool:
        """It does."""
        return True

    @property
    def work(self) -> int:
        """Every query with every slot of a table's row."""
        return self.query.size * self.table_tokens

    def check_values(self) -> None:
        """Checks offsets, lengths and block ids."""
        lens = check_starts("query_start_loc", self.query_start_loc, self.num_tokens, self.max_query_len)
        check_tables(
            self.block_tables,
            self.seq_lens,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            query_lens=lens if self.spec.causal else None,
        )

    def check_statics(self) -> None:
        """Checks that a chunk is a power of two."""
        super().check_statics()
        chunk = self.kv_chunk_size
        if chunk is not None and (not isinstance(chunk, int) or chunk < 128 or chunk & (chunk - 1)):
            raise InvalidInput(f"kv_chunk_size is {chunk}; it must be a power of two, 128 or more.")

    def check_options(self) -> None:
        """Runs the checks of all attention, and checks that a block exists and that the dtypes fit together."""
        super().check_options()
        if self.num_blocks == 0:
            raise InvalidInput("the cache has no block; block 0 at least must be there.")
        query, key = dtype_name(self.query), self.key_dtype
        if key not in (*FP8_DTYPES, "int8") and query not in (key, *FP8_DTYPES):
            raise InvalidInput(f"query is {query} and the cache {key}; cast one of them, or quantise the cache.")


@dataclass(frozen=True, kw_only=True)
class PagedCall(TableCall[A]):
    """Attention of new tokens to their sequences' keys and values in a paged cache: one array, or a pair of arrays.

    Attributes:
        kv_cache: keys at index 0 of the second axis, values at index 1; block 0 is the null block. The public functions
            also take a pair of a key cache and a value cache, which lack that axis and whose head sizes may differ.
        key_cache: keys only, with `value_cache`; then `kv_cache` is None.
        value_cache: values only; their head size may differ.
        v_scale: dequantisation scale of stored values; None for 1.
        k_scale_cache: dequantisation scale of each token and head, instead of `k_scale`.
        v_scale_cache: the same for values.
    """

    name: ClassVar[str] = "paged_attention"

    kv_cache: Shaped[A, "num_blocks 2 block_size num_kv_heads head_size"] | None = None
    key_cache: Shaped[A, "num_blocks block_size num_kv_heads head_size"] | None = None
    value_cache: Shaped[A, "num_blocks block_size num_kv_heads value_head_size"] | None = None
    v_scale: Float32[A, "1"] | float | None = None
    k_scale_cache: Float32[A, "num_blocks block_size num_kv_heads"] | None = None
    v_scale_cache: Float32[A, "num_blocks block_size num_kv_heads"] | None = None

    @property
    def caches(self) -> A | tuple[A, A]:
        """The cache as the public functions take it: one array, or a pair."""
        return (self.key_cache, self.value_cache) if self.kv_cache is None else self.kv_cache  # type: ignore[return-value]

    @property
    def value_offset(self) -> int:
        """Elements from the first key to the first value of one cache."""
        return 0 if self.kv_cache is None else self.kv_cache.element_strides[1]

    def keys(self) -> ArraySpec:
        """Returns the key cache, or the view of the keys of one cache."""
        return self.key_cache if self.kv_cache is None else self.kv_cache.without_axis(1)  # type: ignore[return-value]

    def values(self) -> ArraySpec:
        """Returns the value cache, or the same view."""
        return self.value_cache if self.kv_cache is None else self.kv_cache.without_axis(1)  # type: ignore[return-value]

    def buffers(self) -> tuple[str, str]:
        """Returns the names of the caches."""
        return ("key_cache", "value_cache") if self.kv_cache is None else ("kv_cache", "kv_cache")

    def check_options(self) -> None:
        """Checks the form of the cache and its scales, and runs the checks of every call with a table."""
        check_caches(self.kv_cache, self.key_cache, self.value_cache)
        super().check_options()
        check_token_scales(self.k_scale_cache, self.v_scale_cache, self.k_scale, self.v_scale, self.key_dtype)

    def _keys_and_values(self) -> tuple[A, A]:
        if self.kv_cache is not None:
            return self.kv_cache, self.kv_cache
        return self.key_cache, self.value_cache  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class DenseCall(SegmentFields[A], AttentionCall[A]):
    """Attention of packed queries to packed keys and values, sequence by sequence.

    The numbers of keys and queries may differ (cross attention); the mask is aligned bottom-right.

    Attributes:
        key: keys, packed like the queries.
        value: values, packed like the keys; their head size may differ.
        key_start_loc: cumulative sum of the key lengths, starting with 0.
        dropout_seeds: seeds of each sequence and head that choose the dropped weights; see
            `torch_core.attention.dropout`. The lse does not depend on them.
        max_key_len: upper bound on the key lengths, in tokens; None for the length of the arrays.
        dropout_rate: share of dropped weights, rounded to a multiple of 2^-16; above 0 only with `dropout_seeds`.
        deterministic: whether gradients have the same bits in every run; without, heads of 256 take 3% to 7% less
            time up to 2,048 tokens.
    """

    name: ClassVar[str] = "attention"

    key: Float[A, "num_keys num_kv_heads head_size"]
    value: Float[A, "num_keys num_kv_heads value_head_size"]
    key_start_loc: Int32[A, "num_seqs+1"]
    dropout_seeds: Int32[A, "num_seqs num_heads 2"] | None = None
    max_key_len: int | None = None
    dropout_rate: float = 0.0
    deterministic: bool = True

    @property
    def drops(self) -> bool:
        """There are seeds to drop by."""
        return self.dropout_seeds is not None

    def rows_of_a_sequence(self) -> dict[str, int]:
        """Returns `max_query_len` and `max_key_len` where all sequences can have these lengths."""
        keys = (self.key.shape[0], self.max_key_len)
        return even_axes(self.num_seqs, num_tokens=(self.num_tokens, self.max_query_len), num_keys=keys)

    @property
    def work(self) -> int:
        """Every query with every key of a sequence."""
        return self.query.size * (self.max_key_len or self.key.shape[0])

    def keys(self) -> ArraySpec:
        """Returns the keys."""
        return self.key

    def values(self) -> ArraySpec:
        """Returns the values."""
        return self.value

    def buffers(self) -> tuple[str, str]:
        """Returns their names."""
        return "key", "value"

    def check_values(self) -> None:
        """Checks offsets, then segments."""
        check_starts("query_start_loc", self.query_start_loc, self.num_tokens, self.max_query_len)
        check_starts("key_start_loc", self.key_start_loc, self.key.shape[0], self.max_key_len)
        super().check_values()

    def check_statics(self) -> None:
        """Checks that the bounds on the lengths are ints, the rate of dropout a number, `deterministic` a bool."""
        super().check_statics()
        if not isinstance(self.deterministic, bool):
            raise InvalidInput(f"deterministic is {self.deterministic!r}; it must be a static True or False.")
        check_rate(self.dropout_rate)
        if self.max_key_len is not None:
            check_static("max_key_len", self.max_key_len)

    def check_options(self) -> None:
        """Runs the checks of all attention, and checks that keys have the query's dtype and that dropout has seeds."""
        super().check_options()
        if (self.dropout_rate > 0) != self.drops:
            given = "given" if self.drops else "missing"
            wanted = "a rate above 0 needs seeds, and seeds need one"
            raise InvalidInput("dropout_rate", f"is {self.dropout_rate} and dropout_seeds {given}", wanted)
        if self.key_dtype != dtype_name(self.query):
            wanted = "they must be equal: 8-bit keys need a paged cache"
            raise InvalidInput("query", f"is {dtype_name(self.query)} and key {self.key_dtype}", wanted)

    def _keys_and_values(self) -> tuple[A, A]:
        return self.key, self.value
