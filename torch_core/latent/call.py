"""LatentCall and LatentWriteCall: multi-head latent attention over one row for each token, and the write of such rows.

MLA keeps for each token a compressed latent and a rotary key that all heads share (DeepSeek-V2, arXiv 2405.04434).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Float32, Int32, Shaped

from torch_core.attention.call import PagedCall, TableCall
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import KV_CACHE_DTYPES, QUERY_DTYPES, ArraySpec, packed_latent_bytes
from torch_core.cache_writes.call import WriteCall
from torch_core.launch.call import A, Call, dtype_name
from torch_core.launch.values import check_slots


@dataclass(frozen=True, kw_only=True)
class LatentCall(TableCall[A]):
    """Attention to cached latents in the absorbed form: every head's key is a token's whole row, the value its latent.

    The projections from latents to keys and values are applied to the query beforehand and to the output afterwards.

    Attributes:
        latent_cache: for each slot the latent and, after it, the rotary key; block 0 is the null block. `k_scale` is
            for the whole row. uint8 rows are packed, see `LatentCacheSpec`; their values count as rounded to the
            query's type.
        scale: factor on the scores: that of the plain form, `(nope_dim + rope_dim) ** -0.5` for most models; no
            default.
        kv_lora_rank: number of elements of the latent, and so of an output row.
    """

    name: ClassVar[str] = "mla_attention"

    latent_cache: Shaped[A, "num_blocks block_size row_size"]
    kv_lora_rank: int

    @property
    def is_packed(self) -> bool:
        """Rows are packed, with scales of their own."""
        return _is_packed(self.latent_cache)

    @property
    def v_scale(self) -> A | float | None:
        """A value is a part of its key."""
        return self.k_scale

    @property
    def values_are_keys(self) -> bool:
        """A latent is the first part of its row."""
        return True

    def keys(self) -> ArraySpec:
        """Returns the view of whole rows as keys of one head."""
        return _rows(self.latent_cache)

    def values(self) -> ArraySpec:
        """Returns the view of latents as values of one head."""
        return _rows(self.latent_cache, 0, self.kv_lora_rank)

    def buffers(self) -> tuple[str, str]:
        """Returns the name of the cache, twice."""
        return "latent_cache", "latent_cache"

    def element_types(self) -> dict[str, str]:
        """Returns the element types that kernels load and store; packed rows hold e4m3."""
        return super().element_types() | ({"latent_cache": "float8_e4m3fn"} if self.is_packed else {})

    def __post_init__(self, scale: float | None, *mask: Any) -> None:
        """Makes the spec, unless it is given, and checks the options that are numbers."""
        if self.spec is None and scale is None:
            # A default would be of the absorbed head, which is wider than the one that the model was trained with.
            wanted = "give that of the plain form, (nope_dim + rope_dim) ** -0.5 for most models: latents do not say it"
            raise InvalidInput("scale", value=None, wanted=wanted)
        super().__post_init__(scale, *mask)

    def check_statics(self) -> None:
        """Checks that the rank is an int."""
        super().check_statics()
        check_int("kv_lora_rank", self.kv_lora_rank, 1)

    def check_options(self) -> None:
        """Checks that a row holds a latent, and runs the checks of every call with a table."""
        rank, shape = self.kv_lora_rank, list(self.latent_cache.shape)
        if self.is_packed:
            _check_packed(shape[2], rank, self.head_size - rank, self.k_scale)
        elif shape[2] != self.head_size:
            wanted = f"it must be [num_blocks, block_size, head_size] with head_size = {self.head_size}, that of query"
            raise InvalidInput("latent_cache", f"has shape {shape}", wanted)
        if rank > self.head_size:
            wanted = "a row is the latent and, after it, the rotary key"
            raise InvalidInput("kv_lora_rank", f"is {rank} and latent_cache has rows of {self.head_size}", wanted)
        super().check_options()

    def _keys_and_values(self) -> tuple[Any, Any]:
        # As specs: a slice of a JAX array would be a copy.
        cache = self.latent_cache
        spec = cache if isinstance(cache, ArraySpec) else ArraySpec(tuple(cache.shape), dtype_name(cache))
        if self.is_packed:
            # The elements that a row stands for.
            spec = ArraySpec((*spec.shape[:2], self.head_size), "float8_e4m3fn")
        return _rows(spec), _rows(spec, 0, self.kv_lora_rank)


@dataclass(frozen=True, kw_only=True)
class LatentWriteCall(Call[A]):
    """The write of new latents and rotary keys at their slots; elements are stored as `WriteCall` says.

    Of a packed row (see `LatentCacheSpec`) each scale is `max(absmax / 448, 2**-126)` of its elements, in float32.

    Attributes:
        kv_c: the latent of each token, normalised; rows after the last slot are padding.
        k_pe: the rotary key of each token: rotated, or with `positions` not yet rotated.
        slot_mapping: `block * block_size + offset`; a negative slot writes nothing. No slot may occur twice.
        latent_cache: rows of a latent followed by its rotary key, or packed rows of uint8; written.
        k_scale: dequantisation scale of stored elements; None for 1.
        cos_sin_cache: for each position the cosines of all angles and then the sines, for half as many angles as `k_pe`
            has elements. Rotation is in float32, and its result is rounded to k_pe's type.
        positions: position of each token; those of tokens without a slot are not read.
        is_neox_style: rotate element i with element i + rope_dim / 2; if False, rotate neighbours, as in DeepSeek's
            models.
    """

    name: ClassVar[str] = "write_latent_cache"

    kv_c: Shaped[A, "num_tokens kv_lora_rank"]
    k_pe: Shaped[A, "num_keys rope_dim"]
    slot_mapping: Int32[A, "num_slots"]
    latent_cache: Shaped[A, "num_blocks block_size latent_size"]
    k_scale: Float32[A, "1"] | float | None = None
    cos_sin_cache: Float[A, "max_positions rotated_dim"] | None = None
    positions: Int32[A, "num_positions"] | None = None
    is_neox_style: bool = False

    @property
    def is_packed(self) -> bool:
        """Rows are packed, with scales of their own."""
        return _is_packed(self.latent_cache)

    @property
    def is_empty(self) -> bool:
        """There is no slot."""
        return self.slot_mapping.shape[0] == 0

    @property
    def written(self) -> tuple[str, ...]:
        """The cache."""
        return ("latent_cache",)

    @property
    def work(self) -> int:
        """The elements of the latents."""
        return self.kv_c.size

    def element_types(self) -> dict[str, str]:
        """Returns the element types that kernels load and store; packed rows hold e4m3."""
        return super().element_types() | ({"latent_cache": "float8_e4m3fn"} if self.is_packed else {})

    def check_values(self) -> None:
        """Checks slots, and positions of tokens that have one."""
        check_slots(self.slot_mapping, *self.latent_cache.shape[:2])
        if self.positions is None or self.cos_sin_cache is None:
            return
        slots, limit = np.asarray(self.slot_mapping), self.cos_sin_cache.shape[0]
        positions = np.asarray(self.positions)[: len(slots)]
        bad = (slots >= 0) & ((positions < 0) | (positions >= limit))
        if bad.any():
            first = int(bad.argmax())
            raise InvalidInput(
                f"positions[{first}] is {positions[first]}; cos_sin_cache has positions 0 to {limit - 1}."
            )

    def rotated_by(self, rotate: Callable[[A, A], A]) -> LatentWriteCall[A]:
        """Returns the call with rotary keys that are rotated: `rotate` takes the call's angles and positions."""
        if self.cos_sin_cache is None or self.positions is None:
            return self
        k_pe = rotate(self.cos_sin_cache, self.positions)
        return replace(self, k_pe=k_pe, cos_sin_cache=None, positions=None)

    def check_options(self) -> None:
        """Checks that the parts make a row, rows for slots, and the dtypes that go together."""
        rank, rope, size = self.kv_c.shape[1], self.k_pe.shape[1], self.latent_cache.shape[2]
        if self.is_packed:
            _check_packed(size, rank, rope, self.k_scale)
        elif rank + rope != size or 0 in (rank, rope):
            wanted = "a row is the first and, after it, the second, both of at least one element"
            raise InvalidInput("kv_c", f"has {rank} elements, k_pe {rope}, and latent_cache rows of {size}", wanted)
        self._check_rotation(rope)
        cache = dtype_name(self.latent_cache)
        if not self.is_packed and cache not in (*KV_CACHE_DTYPES, "float64"):
            raise InvalidInput(f"latent_cache is {cache}; it must be one of {', '.join(KV_CACHE_DTYPES)}.")
        for name, array in (("kv_c", self.kv_c), ("k_pe", self.k_pe)):
            if array.shape[0] < self.slot_mapping.shape[0]:
                problem = f"has {self.slot_mapping.shape[0]} entries and {name} {array.shape[0]} tokens"
                raise InvalidInput("slot_mapping", problem, "give at most one slot for each token")
            if dtype_name(array) not in (*QUERY_DTYPES, "float64", cache):
                wanted = "give float32, bfloat16 or float16, or the cache's own dtype"
                raise InvalidInput(name, f"is {dtype_name(array)} and latent_cache {cache}", wanted)

    def _check_rotation(self, rope: int) -> None:
        if (self.cos_sin_cache is None) != (self.positions is None):
            raise InvalidInput("one of cos_sin_cache and positions is None; a rotary key is rotated by both.")
        if self.cos_sin_cache is None or self.positions is None:
            return
        if rope % 2 or self.cos_sin_cache.shape[1] != rope:
            wanted = "each pair of the first has a cosine and a sine in the second: they must be equal, and even"
            raise InvalidInput("k_pe", f"has {rope} elements and cos_sin_cache {self.cos_sin_cache.shape[1]}", wanted)
        if self.positions.shape[0] < self.slot_mapping.shape[0]:
            problem = f"has {self.slot_mapping.shape[0]} entries and positions {self.positions.shape[0]}"
            raise InvalidInput("slot_mapping", problem, "give a position for each")


def _is_packed(latent_cache: Any) -> bool:
    return dtype_name(latent_cache) == "uint8"


def _check_packed(size: int, rank: int, rope: int, scale: object) -> None:
    needed = packed_latent_bytes(rank, rope)
    if size != needed:
        wanted = f"a packed row of a latent of {rank} and a rotary key of {rope} elements has {needed}"
        raise InvalidInput("latent_cache", f"is uint8 with rows of {size} bytes", wanted)
    if scale is not None:
        raise InvalidInput("k_scale is given and latent_cache packed; packed rows have scales of their own: leave it.")


def as_paged(call: LatentCall[A]) -> PagedCall[A]:
    """Returns the same attention over a pair of caches with one head, views of the latents (in JAX: slices).

    Not of packed rows, whose elements are no elements of the cache.
    """
    given = {name: value for name, value in call.__dict__.items() if name not in ("latent_cache", "kv_lora_rank")}
    key, value = _rows(call.latent_cache), _rows(call.latent_cache, 0, call.kv_lora_rank)
    return PagedCall(**given, v_scale=call.k_scale, key_cache=key, value_cache=value)


def as_write(call: LatentWriteCall[A]) -> WriteCall[A]:
    """Returns the same write into a pair of caches with one head, views of the latents; not of packed rows."""
    rank = call.kv_c.shape[1]
    return WriteCall(
        key=_rows(call.kv_c),
        value=_rows(call.k_pe),
        slot_mapping=call.slot_mapping,
        key_cache=_rows(call.latent_cache, 0, rank),
        value_cache=_rows(call.latent_cache, rank),
        k_scale=call.k_scale,
        v_scale=call.k_scale,
    )


def _rows(array: Any, first: int = 0, last: int | None = None) -> Any:
    """Returns the view of elements [first, last) of rows, with an axis of one head before them."""
    if not isinstance(array, ArraySpec):
        return array[..., None, first:last]
    *outer, inner = array.element_strides
    size = array.shape[-1]
    shape = (*array.shape[:-1], 1, (size if last is None else last) - first)
    return ArraySpec(shape, array.dtype, (*outer, size, inner), array.aligned)
