"""LatentCall and LatentWriteCall: multi-head latent attention over one row for each token, and the write of such rows.

MLA keeps for each token a compressed latent and a rotary key that all heads share (DeepSeek-V2, arXiv 2405.04434).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float32, Int32, Shaped

from torch_core.calls.attention import PagedCall, TableCall
from torch_core.calls.cache import WriteCall
from torch_core.calls.call import A, Call, dtype_name
from torch_core.checks import check_int
from torch_core.errors import InvalidInput
from torch_core.specs import KV_CACHE_DTYPES, QUERY_DTYPES, ArraySpec

__all__ = ["LatentCall", "LatentWriteCall", "as_paged", "as_write"]


@dataclass(frozen=True, kw_only=True)
class LatentCall(TableCall[A]):
    """Attention to cached latents in the absorbed form: every head's key is a token's whole row, the value its latent.

    The projections from latents to keys and values are applied to the query beforehand and to the output afterwards.

    Attributes:
        latent_cache: for each slot the latent and, after it, the rotary key; block 0 belongs to nobody. `k_scale` is
            for the whole row.
        kv_lora_rank: elements of the latent, and so of an output row.
    """

    name: ClassVar[str] = "mla_attention"

    latent_cache: Shaped[A, "num_blocks block_size head_size"]
    kv_lora_rank: int

    @property
    def v_scale(self) -> A | float | None:
        """A value is a part of its key."""
        return self.k_scale

    def check_statics(self) -> None:
        """Checks that the rank is an int."""
        super().check_statics()
        check_int("kv_lora_rank", self.kv_lora_rank, 1)

    def check_options(self) -> None:
        """Checks that a row holds a latent, and what every call with a table checks."""
        if self.kv_lora_rank > self.latent_cache.shape[2]:
            raise InvalidInput(
                f"kv_lora_rank is {self.kv_lora_rank} and latent_cache has rows of {self.latent_cache.shape[2]}; a row "
                "is the latent and, after it, the rotary key."
            )
        super().check_options()

    def _keys_and_values(self) -> tuple[Any, Any]:
        # As specs: a slice of a JAX array would be a copy.
        cache = self.latent_cache
        spec = cache if isinstance(cache, ArraySpec) else ArraySpec(tuple(cache.shape), dtype_name(cache))
        return _rows(spec), _rows(spec, 0, self.kv_lora_rank)


@dataclass(frozen=True, kw_only=True)
class LatentWriteCall(Call[A]):
    """The write of new latents and rotary keys at their slots; elements are stored as `WriteCall` says.

    Attributes:
        kv_c: the latent of each token, normalised; rows after the last slot are padding.
        k_pe: the rotary key of each token, rotated.
        slot_mapping: `block * block_size + offset`; a negative slot writes nothing. No slot may occur twice.
        latent_cache: rows of the latent and, after it, the rotary key; written.
        k_scale: what one stored unit is worth; None for 1.
    """

    name: ClassVar[str] = "write_latent_cache"

    kv_c: Shaped[A, "num_tokens kv_lora_rank"]
    k_pe: Shaped[A, "num_keys rope_dim"]
    slot_mapping: Int32[A, "num_slots"]
    latent_cache: Shaped[A, "num_blocks block_size latent_size"]
    k_scale: Float32[A, "1"] | float | None = None

    @property
    def is_empty(self) -> bool:
        """There is no slot."""
        return self.slot_mapping.shape[0] == 0

    @property
    def written(self) -> tuple[str, ...]:
        """The cache."""
        return ("latent_cache",)

    def check_options(self) -> None:
        """Checks that the parts make a row, rows for slots, and the dtypes that go together."""
        rank, rope, size = self.kv_c.shape[1], self.k_pe.shape[1], self.latent_cache.shape[2]
        if rank + rope != size or 0 in (rank, rope):
            raise InvalidInput(
                f"kv_c has {rank} elements, k_pe {rope}, and latent_cache rows of {size}; a row is the first and, "
                "after it, the second, both of at least one element."
            )
        cache = dtype_name(self.latent_cache)
        if cache not in (*KV_CACHE_DTYPES, "float64"):
            raise InvalidInput(f"latent_cache is {cache}; it must be one of {', '.join(KV_CACHE_DTYPES)}.")
        for name, array in (("kv_c", self.kv_c), ("k_pe", self.k_pe)):
            if array.shape[0] < self.slot_mapping.shape[0]:
                raise InvalidInput(
                    f"slot_mapping has {self.slot_mapping.shape[0]} entries and {name} {array.shape[0]} tokens; give "
                    "at most one slot for each token."
                )
            if dtype_name(array) not in (*QUERY_DTYPES, "float64", cache):
                raise InvalidInput(
                    f"{name} is {dtype_name(array)} and latent_cache {cache}; give float32, bfloat16 or float16, or "
                    "the cache's own dtype."
                )


def as_paged(call: LatentCall[A]) -> PagedCall[A]:
    """Returns the same attention over a pair of caches with one head, views of the latents (in JAX: slices)."""
    given = {name: value for name, value in call.__dict__.items() if name not in ("latent_cache", "kv_lora_rank")}
    key, value = _rows(call.latent_cache), _rows(call.latent_cache, 0, call.kv_lora_rank)
    return PagedCall(**given, v_scale=call.k_scale, key_cache=key, value_cache=value)


def as_write(call: LatentWriteCall[A]) -> WriteCall[A]:
    """Returns the same write into a pair of caches with one head, views of the latents."""
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
