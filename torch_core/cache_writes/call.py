"""WriteCall and CopyCall: in-place operations on blocks of the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float32, Int32, Shaped

from torch_core.attention.checks import check_caches, check_token_scales
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import KV_CACHE_DTYPES, QUERY_DTYPES
from torch_core.launch.call import A, Call, dtype_name
from torch_core.launch.values import check_slots


@dataclass(frozen=True, kw_only=True)
class WriteCall(Call[A]):
    """The write of new keys and values at their slots.

    An element is stored as `real / scale`; an 8-bit cache saturates, int8 rounds halves to even, and elements of the
    cache's own 8-bit type are stored unchanged. With scale caches the scale of a head's row is computed as
    `max(max(abs(row)) / largest, 1e-6)` and stored there (vLLM: triton_reshape_and_cache_flash).

    Attributes:
        key: new keys, one row for each slot, or more; rows after the last slot are padding.
        value: new values, likewise; the head size may differ for a pair of caches.
        slot_mapping: `block * block_size + offset`; a negative slot writes nothing. No slot may occur twice.
        kv_cache: keys at index 0 of the second axis, values at index 1; written. The public functions also take a pair
            of a key cache and a value cache, which lack that axis.
        key_cache: keys only, with `value_cache`; then `kv_cache` is None.
        value_cache: values only.
        k_scale: dequantisation scale of stored keys; None for 1.
        v_scale: the same for values.
        k_scale_cache: array that stores the scale of each token and head.
        v_scale_cache: the same for values.
    """

    name: ClassVar[str] = "write_kv_cache"

    key: Shaped[A, "num_tokens num_kv_heads head_size"]
    value: Shaped[A, "num_values num_kv_heads value_head_size"]
    slot_mapping: Int32[A, "num_slots"]
    kv_cache: Shaped[A, "num_blocks 2 block_size num_kv_heads head_size"] | None = None
    key_cache: Shaped[A, "num_blocks block_size num_kv_heads head_size"] | None = None
    value_cache: Shaped[A, "num_blocks block_size num_kv_heads value_head_size"] | None = None
    k_scale: Float32[A, "1"] | float | None = None
    v_scale: Float32[A, "1"] | float | None = None
    k_scale_cache: Float32[A, "num_blocks block_size num_kv_heads"] | None = None
    v_scale_cache: Float32[A, "num_blocks block_size num_kv_heads"] | None = None

    @property
    def cache_dtype(self) -> str:
        """Element type of the cache."""
        return dtype_name(self.key_cache if self.kv_cache is None else self.kv_cache)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return (self.key_cache if self.kv_cache is None else self.kv_cache).shape[0]  # type: ignore[union-attr]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return (self.key_cache if self.kv_cache is None else self.kv_cache).shape[-3]  # type: ignore[union-attr]

    @property
    def is_empty(self) -> bool:
        """There is no slot."""
        return self.slot_mapping.shape[0] == 0

    @property
    def written(self) -> tuple[str, ...]:
        """The caches, and with scales per token and head theirs."""
        names = ("kv_cache", "key_cache", "value_cache", "k_scale_cache", "v_scale_cache")
        return tuple(name for name in names if getattr(self, name) is not None)

    def equal_axes(self) -> dict[str, str]:
        """Returns the axes of values and slots, if there is one for each key."""
        rows_in = {"num_values": self.value, "num_slots": self.slot_mapping}
        return {dim: "num_tokens" for dim, x in rows_in.items() if x.shape[0] == self.key.shape[0]}

    @property
    def work(self) -> int:
        """The elements of the keys."""
        return self.key.size

    def check_values(self) -> None:
        """Checks slots."""
        check_slots(self.slot_mapping, self.num_blocks, self.block_size)

    def check_options(self) -> None:
        """Checks the form of the cache, rows for slots, and the dtypes that go together."""
        check_caches(self.kv_cache, self.key_cache, self.value_cache)
        key, value, cache = dtype_name(self.key), dtype_name(self.value), self.cache_dtype
        check_token_scales(self.k_scale_cache, self.v_scale_cache, self.k_scale, self.v_scale, cache)
        if self.kv_cache is not None and self.key.shape[2] != self.value.shape[2]:
            wanted = "in one cache they are equal"
            raise InvalidInput("value", f"has head size {self.value.shape[2]} and key {self.key.shape[2]}", wanted)
        if self.value_cache is not None and dtype_name(self.value_cache) != cache:
            raise InvalidInput(f"key_cache is {cache} and value_cache {dtype_name(self.value_cache)}; use one dtype.")
        if cache not in (*KV_CACHE_DTYPES, "float64"):
            raise InvalidInput(f"the cache is {cache}; it must be one of {', '.join(KV_CACHE_DTYPES)}.")
        for name, array in (("key", self.key), ("value", self.value)):
            if array.shape[0] < self.slot_mapping.shape[0]:
                problem = f"has {self.slot_mapping.shape[0]} entries and {name} {array.shape[0]} tokens"
                raise InvalidInput("slot_mapping", problem, "give at most one slot for each token")
        wanted = (*QUERY_DTYPES, "float64") if self.k_scale_cache is not None else (*QUERY_DTYPES, "float64", cache)
        for name, dtype in (("key", key), ("value", value)):
            if dtype not in wanted:
                raise InvalidInput(
                    f"{name} is {dtype} and the cache {cache}; give float32, bfloat16 or float16"
                    + (" to be quantised." if self.k_scale_cache is not None else ", or the cache's own dtype.")
                )


@dataclass(frozen=True, kw_only=True)
class CopyCall(Call[A]):
    """The copy of whole blocks inside one array: the copy of copy-on-write.

    Attributes:
        block_mapping: (source, target) of each copy; a pair with a negative entry copies nothing. The copies run in no
            order: no target may be another pair's source or target.
        kv_cache: an array whose first of one to five axes is the block; written.
    """

    name: ClassVar[str] = "copy_blocks"

    block_mapping: Int32[A, "num_pairs 2"]
    kv_cache: Shaped[A, "num_blocks ..."]

    @property
    def is_empty(self) -> bool:
        """There is no pair."""
        return self.block_mapping.shape[0] == 0

    @property
    def written(self) -> tuple[str, ...]:
        """The cache."""
        return ("kv_cache",)

    def check_values(self) -> None:
        """Checks block ids, and that no block is written that another pair reads or writes."""
        pairs = [(at, *pair) for at, pair in enumerate(self.block_mapping.tolist()) if min(pair) >= 0]
        num_blocks = self.kv_cache.shape[0]
        sources = {source for _, source, _ in pairs}
        targets: set[int] = set()
        for at, source, target in pairs:
            if max(source, target) >= num_blocks:
                raise InvalidInput(
                    f"block_mapping[{at}] is ({source}, {target}); the cache has blocks 0 to {num_blocks - 1}."
                )
            if target in targets or (target in sources and target != source):
                raise InvalidInput(
                    f"block_mapping[{at}] writes block {target}, which another pair reads or writes; give every "
                    "destination once, and none that is a source."
                )
            targets.add(target)

    def check_options(self) -> None:
        """Checks the number of axes."""
        if not 1 <= len(self.kv_cache.shape) <= 5:
            wanted = "it must have 1 to 5 axes, blocks first"
            raise InvalidInput("kv_cache", f"has shape {list(self.kv_cache.shape)}", wanted)
