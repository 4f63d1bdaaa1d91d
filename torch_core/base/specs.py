"""Frozen descriptions of a cache and of an attention call, shared by every layer; standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import TypeAlias

from torch_core.base.checks import INT32_MAX, check_bool, check_int
from torch_core.base.errors import InvalidInput, Unsupported

#: The slot of a padded token: nothing is written for it. vLLM: vllm/v1/attention/backends/utils.py.
PAD_SLOT_ID = -1

#: Bytes of one element, by the name that numpy (with ml_dtypes), torch and jax agree on.
DTYPE_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
QUERY_DTYPES = ("float32", "bfloat16", "float16")
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
KV_CACHE_DTYPES = (*QUERY_DTYPES, *FP8_DTYPES, "int8")
#: The largest value of each 8-bit type that keys, values and outputs are quantised to; int8 leaves out -128.
LARGEST_CODE = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
#: A scale per token and head is never smaller, so that a row of zeros does not divide by zero. vLLM uses the same.
SMALLEST_SCALE = 1e-6
#: The first devices with instructions for e4m3.
E4M3_ARCH = 89
#: The one compute capability with the instructions that kernels written for Hopper use.
HOPPER_ARCH = 90
#: Elements of a packed latent that share a scale.
PACKED_GROUP = 128
_MAX_BLOCK_SIZE = 256
#: Elements of one head of a cache, and of the kernels that read it.
MAX_HEAD_SIZE = 512


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a contiguous row-major array of `shape`.

    Example:
        >>> row_major_strides((4, 2, 8))
        (16, 8, 1)
    """
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def packed_latent_bytes(kv_lora_rank: int, rope_dim: int) -> int:
    """Returns the bytes of a packed row of a latent cache; see `LatentCacheSpec`.

    Raises:
        InvalidInput: sizes that cannot be packed.

    Example:
        >>> packed_latent_bytes(512, 64)
        656
    """
    if kv_lora_rank % PACKED_GROUP or rope_dim % 2:
        wanted = f"a packed row has a latent of a multiple of {PACKED_GROUP} and an even rotary key. Use another dtype"
        raise InvalidInput("kv_lora_rank", f"is {kv_lora_rank} and rope_dim {rope_dim}", wanted)
    return kv_lora_rank + kv_lora_rank // PACKED_GROUP * DTYPE_BYTES["float32"] + rope_dim * DTYPE_BYTES["bfloat16"]


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape, dtype and strides of an array, without the array.

    Attributes:
        shape: sizes of the axes.
        dtype: element type by name, a key of `DTYPE_BYTES`.
        strides: elements from one entry of an axis to the next; None means contiguous row-major.
        aligned: the first element's address is a multiple of 16 bytes. XLA's launcher refuses other operands;
            torch guarantees it for every allocation, not for every view.

    Example:
        >>> ArraySpec((4, 8), "bfloat16").element_strides
        (8, 1)
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    aligned: bool = True
    # Plans are looked up by the specs of a call: hashing each spec again would slow down every launch.
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __hash__(self) -> int:
        return self._hash

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shape, self.dtype, self.strides, self.aligned)))
        if self.dtype not in DTYPE_BYTES:
            raise Unsupported("dtype", value=self.dtype, wanted=f"a kernel takes one of {', '.join(DTYPE_BYTES)}")
        if self.strides is not None and len(self.strides) != len(self.shape):
            wanted = "give one per axis"
            raise InvalidInput("strides", f"{self.strides} and shape {self.shape} differ in length", wanted)

    @property
    def element_strides(self) -> tuple[int, ...]:
        """The strides in elements, with None resolved."""
        return row_major_strides(self.shape) if self.strides is None else self.strides

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def without_axis(self, axis: int) -> ArraySpec:
        """Returns the view of the first entry of an axis, as of the keys of a combined cache."""
        shape, strides = (sizes[:axis] + sizes[axis + 1 :] for sizes in (self.shape, self.element_strides))
        return ArraySpec(shape, self.dtype, strides, self.aligned)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The layout of one layer's paged key/value cache.

    The logical shape is `(num_blocks, 2, block_size, num_kv_heads, head_size)`: index 0 of the second axis holds keys,
    index 1 values. Block 0 is the null block: no sequence ever owns it.

    Attributes:
        num_kv_heads: key/value heads.
        head_size: elements of one head.
        block_size: tokens of one block, 1 to 256.
        dtype: element type by name, one of `KV_CACHE_DTYPES`.

    Example:
        >>> spec = KVCacheSpec(num_kv_heads=8, head_size=128, block_size=16, dtype="bfloat16")
        >>> spec.shape(64)
        (64, 2, 16, 8, 128)
        >>> spec.bytes_per_block
        65536
    """

    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        check_int("num_kv_heads", self.num_kv_heads, 1, 1 << 16)
        check_int("head_size", self.head_size, 1, MAX_HEAD_SIZE)
        check_int("block_size", self.block_size, 1, _MAX_BLOCK_SIZE)
        _check_cache_dtype(self.dtype)

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Returns the shape of one layer's cache array for `num_blocks` blocks."""
        return (num_blocks, 2, self.block_size, self.num_kv_heads, self.head_size)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in one layer."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCacheSpec:
    """The layout of one layer's cache of multi-head latent attention: `(num_blocks, block_size, latent + rope)`.

    Block 0 is the null block, as in a `KVCacheSpec`. With dtype "uint8", rows are packed as FlashMLA and vLLM
    ("fp8_ds_mla") have them: the latent in e4m3, a float32 scale for each 128 of its elements, and the rotary key in
    bfloat16, `packed_latent_bytes` in all.

    Attributes:
        kv_lora_rank: elements of a token's latent.
        rope_dim: elements of its rotary key, which all heads share.
        block_size: tokens of one block, 1 to 256.
        dtype: element type by name, one of `KV_CACHE_DTYPES`, or "uint8" for packed rows.

    Example:
        >>> spec = LatentCacheSpec(kv_lora_rank=512, rope_dim=64, block_size=64, dtype="bfloat16")
        >>> spec.shape(8), spec.bytes_per_block
        ((8, 64, 576), 73728)
        >>> LatentCacheSpec(kv_lora_rank=512, rope_dim=64, block_size=64, dtype="uint8").shape(8)
        (8, 64, 656)
    """

    kv_lora_rank: int
    rope_dim: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        check_int("kv_lora_rank", self.kv_lora_rank, 1, 1 << 16)
        check_int("rope_dim", self.rope_dim, 1, 1 << 16)
        check_int("block_size", self.block_size, 1, _MAX_BLOCK_SIZE)
        if self.dtype == "uint8":
            packed_latent_bytes(self.kv_lora_rank, self.rope_dim)
        else:
            _check_cache_dtype(self.dtype)

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Returns the shape of one layer's cache array for `num_blocks` blocks."""
        packed = self.dtype == "uint8"
        row = packed_latent_bytes(self.kv_lora_rank, self.rope_dim) if packed else self.kv_lora_rank + self.rope_dim
        return (num_blocks, self.block_size, row)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in one layer."""
        return math.prod(self.shape(1)) * DTYPE_BYTES[self.dtype]


CacheSpec: TypeAlias = KVCacheSpec | LatentCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCacheSpec:
    """The arrays of one layer that keeps a recurrent state: each is `(num_slots, *shape)`.

    A slot has the state of one sequence after one number of tokens. Slot 0 is the null slot: no sequence ever owns it.
    vLLM's name is MambaSpec (vllm/v1/kv_cache_interface.py).

    Attributes:
        shapes: shape of one slot of each array, such as a convolution's `(width - 1, channels)` and a delta rule's
            `(heads, value_size, key_size)`.
        dtypes: element type of each array by name: float32, bfloat16 or float16.
        split_axes: axis of each shape, heads or channels, over which devices may split the array; empty if every device
            has all of it.

    Example:
        >>> spec = StateCacheSpec(shapes=((3, 64), (4, 16, 16)), dtypes=("bfloat16", "float32"))
        >>> spec.array_shapes(8), spec.bytes_per_slot
        (((8, 3, 64), (8, 4, 16, 16)), 4480)
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    split_axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            problem = f"has {len(self.shapes)} entries and dtypes {len(self.dtypes)}"
            raise InvalidInput("shapes", problem, "give one shape and one dtype for each array, and at least one")
        for index, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            if not shape:
                raise InvalidInput(f"shapes[{index}]", "is empty", "give the sizes of one slot's array")
            for axis, size in enumerate(shape):
                check_int(f"shapes[{index}][{axis}]", size, 1, INT32_MAX)
            if dtype not in QUERY_DTYPES:
                wanted = f"a state can be one of {', '.join(QUERY_DTYPES)}"
                raise Unsupported(f"dtypes[{index}]", value=dtype, wanted=wanted)
        if len(self.split_axes) not in (0, len(self.shapes)):
            wanted = f"give one for each of the {len(self.shapes)} arrays, or none"
            raise InvalidInput("split_axes", f"has {len(self.split_axes)} entries", wanted)
        for index, (axis, shape) in enumerate(zip(self.split_axes, self.shapes, strict=False)):
            check_int(f"split_axes[{index}]", axis, 0, len(shape) - 1)

    def array_shapes(self, num_slots: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shape of each array for `num_slots` slots."""
        return tuple((num_slots, *shape) for shape in self.shapes)

    def of_devices(self, count: int) -> StateCacheSpec:
        """Returns the layout of the arrays of several devices, of which this one is a device's part.

        Example:
            >>> StateCacheSpec(shapes=((3, 64),), dtypes=("float32",), split_axes=(1,)).of_devices(2).shapes
            ((3, 128),)
        """
        shapes = tuple(
            tuple(size * (count if place == axis else 1) for place, size in enumerate(shape))
            for axis, shape in zip(self.split_axes, self.shapes, strict=True)
        )
        return replace(self, shapes=shapes)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one slot takes in this layer."""
        return sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The static options of one attention call, which are the same for every sequence of every step.

    Query row `i` of a sequence with `q` new and `n` total tokens is at position `p = n - q + i` (the mask is
    aligned bottom-right). It sees key `j < n` when every condition that is set holds:
    `j <= p` (causal), `j >= p - window_left`, `j <= p + window_right`, `j // attention_chunk == p // attention_chunk`.
    The order of operations on a score is scale, soft cap, ALiBi, mask.

    Attributes:
        scale: factor on `query @ key`; finite and not zero.
        causal: no key after the query is visible.
        window_left: keys before the query's own position that stay visible; None for all. A Hugging Face or Mistral
            `sliding_window` of W tokens (the own one included) is `window_left=W - 1`.
        window_right: the same for keys after it.
        logits_soft_cap: scores become `cap * tanh(score / cap)`; None for off.
        attention_chunk: chunked local attention: a query sees its own chunk of this many positions only.
        use_alibi_sqrt: ALiBi adds `-slope * sqrt(p - j)` rather than `slope * (j - p)`.

    Example:
        >>> AttentionSpec(scale=0.125, window_left=4095).causal
        True
    """

    scale: float
    causal: bool = True
    window_left: int | None = None
    window_right: int | None = None
    logits_soft_cap: float | None = None
    attention_chunk: int | None = None
    use_alibi_sqrt: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale) or self.scale == 0:
            wanted = "it must be finite and not zero (usually head_size ** -0.5)"
            raise InvalidInput("scale", value=self.scale, wanted=wanted)
        for name, low in (("window_left", 0), ("window_right", 0), ("attention_chunk", 1)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low, INT32_MAX)
        for name in ("causal", "use_alibi_sqrt"):
            check_bool(name, getattr(self, name))
        cap = self.logits_soft_cap
        if cap is not None and not (math.isfinite(cap) and cap > 0):
            wanted = "it must be a positive finite number, or None for off"
            raise InvalidInput("logits_soft_cap", value=cap, wanted=wanted)

    def sets_only(self, *names: str) -> bool:
        """Returns whether all options other than those named have their defaults.

        A kernel asks it about the options that it knows, and so refuses those that are added later.

        Example:
            >>> AttentionSpec(scale=0.1, window_left=3, logits_soft_cap=9.0).sets_only("scale", "window_left")
            False
        """
        others = (each for each in fields(self) if each.name not in names)
        return all(getattr(self, each.name) == each.default for each in others)


def _check_cache_dtype(dtype: str) -> None:
    if dtype not in KV_CACHE_DTYPES:
        raise Unsupported(
            "dtype", value=dtype, wanted=f"a KV cache can be one of {', '.join(map(repr, KV_CACHE_DTYPES))}"
        )
