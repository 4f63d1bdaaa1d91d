"""RotaryWriteCall: queries and keys are rotated, and keys and values written, in one pass over a projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float, Float32, Int32, Shaped

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import KV_CACHE_DTYPES, QUERY_DTYPES, ArraySpec
from torch_core.launch.call import A, Call, dtype_name
from torch_core.launch.values import check_slots


@dataclass(frozen=True, kw_only=True)
class RotaryWriteCall(Call[A]):
    """Rotary embedding (Su et al. 2021, arXiv 2104.09864) of queries and keys, and the write of keys and values.

    Elements are stored as `WriteCall` says, after rotated keys were rounded to the type of `qkv`. The op takes one
    array, because slices of queries, keys and values would be copies.

    Attributes:
        qkv: the heads of queries, of keys and of values, one after the other, the result of one matrix product.
        num_query_heads: heads of queries; what lies behind the values is not read, and needs no copy. None if nothing
            does.
        cos_sin: for each token the cosines of all angles and then the sines, for half as many angles as rotated
            elements. Later elements are unchanged. Rotation is in float32.
        slot_mapping: `block * block_size + offset`; a negative slot writes nothing. No slot may occur twice.
        kv_cache: keys at index 0 of the second axis, values at index 1; written.
        k_scale: dequantisation scale of stored keys; None for 1.
        v_scale: the same for values.
        row_scale: factors of the tokens of `qkv`, for a product of e4m3 numbers that was not scaled; None for 1. With
            them `qkv` may have more rows than there are tokens, which are not read. Scaled elements are rounded to its
            type.
        column_scale: the same for the elements of all heads, one head after the other.
        is_neox_style: rotate element i with element i + rotated_dim / 2; if False, rotate neighbours.
        out_dtype: element type of the rotated queries, "float8_e4m3fn", in which large values saturate; None for that
            of `qkv`, to which they are rounded before.
        out: array of the rotated queries; None allocates a new one. Those of tokens without a slot are rotated too.
    """

    name: ClassVar[str] = "rotate_and_write"

    qkv: Shaped[A, "num_product_rows num_qkv_heads head_size"]
    cos_sin: Float[A, "num_tokens rotated_dim"]
    slot_mapping: Int32[A, "num_slots"]
    # Not num_kv_heads: the heads of all three parts cannot be split equally.
    kv_cache: Shaped[A, "num_blocks 2 block_size num_cached_heads head_size"]
    k_scale: Float32[A, "1"] | float | None = None
    v_scale: Float32[A, "1"] | float | None = None
    row_scale: Float32[A, "num_tokens"] | None = None
    column_scale: Float32[A, "num_columns"] | None = None
    is_neox_style: bool = True
    out_dtype: str | None = None
    num_query_heads: int | None = None
    out: Shaped[A, "num_tokens num_rotated_heads head_size"] | None = None

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys, and of values."""
        return self.kv_cache.shape[3]

    @property
    def num_heads(self) -> int:
        """Heads of queries."""
        return self.qkv.shape[1] - 2 * self.num_kv_heads if self.num_query_heads is None else self.num_query_heads

    def of_heads(self) -> Any:
        """Returns the call with the heads of queries, keys and values alone."""
        return self.of({**self.__dict__, "qkv": self.qkv[:, : self.num_heads + 2 * self.num_kv_heads]})

    @property
    def num_tokens(self) -> int:
        """Tokens."""
        return self.cos_sin.shape[0]

    @property
    def is_empty(self) -> bool:
        """Whether there is no token."""
        return self.num_tokens == 0

    @property
    def result_dtype(self) -> str:
        """Element type of the rotated queries."""
        return self.out_dtype or dtype_name(self.qkv)

    @property
    def written(self) -> tuple[str, ...]:
        """The cache, and the queries where they are given a place."""
        return ("kv_cache",) if self.out is None else ("kv_cache", "out")

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `out`, unless it is given."""
        if self.out is not None:
            return {}
        return {"out": ArraySpec((self.num_tokens, self.num_heads, self.qkv.shape[2]), self.result_dtype)}

    def check_values(self) -> None:
        """Checks slots."""
        check_slots(self.slot_mapping, self.kv_cache.shape[0], self.kv_cache.shape[2])

    def check_statics(self) -> None:
        """Checks the number of heads of queries."""
        if self.num_query_heads is not None:
            check_int("num_query_heads", self.num_query_heads, 1)

    def check_options(self) -> None:
        """Checks heads, rotated elements, rows for slots, and the dtypes that go together."""
        (rows, heads, size), kv_heads, num_tokens = self.qkv.shape, self.num_kv_heads, self.num_tokens
        if self.num_query_heads is not None:
            check_int("num_query_heads", self.num_query_heads, 1, max(heads - 2 * kv_heads, 1))
            heads = self.num_query_heads + 2 * kv_heads
        if not 2 * kv_heads < heads <= self.qkv.shape[1]:
            raise InvalidInput(
                f"qkv has {self.qkv.shape[1]} heads and kv_cache {kv_heads}; qkv must have those of keys and of "
                "values, and at least one of queries before them."
            )
        rotated = self.cos_sin.shape[1]
        if rotated % 2 or not 0 < rotated <= size:
            raise InvalidInput(
                f"cos_sin has {rotated} columns; it must have a cosine and a sine for each rotated pair of the {size} "
                "elements of a head."
            )
        if rows != num_tokens and (self.row_scale is None or rows < num_tokens):
            raise InvalidInput("qkv", f"has {rows} rows", f"there are {num_tokens} tokens, those of cos_sin")
        if (self.row_scale is None) != (self.column_scale is None):
            raise InvalidInput("one of row_scale and column_scale is None; give both or none.")
        if self.column_scale is not None and self.column_scale.shape[0] != heads * size:
            wanted = f"it must be [{heads * size}], a factor for each element of all heads"
            raise InvalidInput("column_scale", f"has shape {list(self.column_scale.shape)}", wanted)
        if self.out_dtype not in (None, "float8_e4m3fn"):
            raise InvalidInput("out_dtype", value=self.out_dtype, wanted="use 'float8_e4m3fn', or None for that of qkv")
        if num_tokens < self.slot_mapping.shape[0]:
            raise InvalidInput(
                f"slot_mapping has {self.slot_mapping.shape[0]} entries and qkv {num_tokens} tokens; give at most one "
                "slot for each token."
            )
        for name, array, wanted in (("qkv", self.qkv, QUERY_DTYPES), ("kv_cache", self.kv_cache, KV_CACHE_DTYPES)):
            if dtype_name(array) not in (*wanted, "float64"):
                raise InvalidInput(name, f"is {dtype_name(array)}", f"it must be one of {', '.join(wanted)}")
        _check_out(self.out, (num_tokens, self.num_heads, size), self.result_dtype)


def _check_out(out: Any, shape: tuple[int, ...], dtype: str) -> None:
    if out is not None and (tuple(out.shape) != shape or dtype_name(out) != dtype):
        raise InvalidInput("out", f"is {dtype_name(out)}{list(out.shape)}", f"it must be {dtype}{list(shape)}")
