"""The vocabulary of the backend contract: kinds of attention, graph support, devices, cache dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, Unsupported

#: The names of cache dtypes; "auto" is the model's own dtype.
CACHE_DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}

#: Of latents only: rows of uint8 as FlashMLA has them, with scales of their own; see `LatentCacheSpec`.
PACKED_LATENTS = "fp8_ds_mla"

#: The order of tokens and heads inside a block: tokens first (NHD) or heads first (HND).
KVCacheLayoutType = Literal["NHD", "HND"]


class AttentionType(StrEnum):
    """The kind of attention of a layer; compares equal to its name as a string.

    `DECODER` attends to its own past through the cache, `ENCODER` (of an encoder-decoder model) and `ENCODER_ONLY` to
    the whole of their own input without a cache, `ENCODER_DECODER` to the encoder's output through a cache.
    """

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"

    @classmethod
    def _missing_(cls, value: object) -> AttentionType:
        wanted = f"it must be one of {', '.join(kind.value for kind in cls)}"
        raise InvalidInput("attn_type", value=value, wanted=wanted)


class AttentionCGSupport(Enum):
    """The batches that a backend can replay from a CUDA graph; a larger value includes the smaller ones."""

    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """Stands for every positive multiple of `base` in a list of block sizes.

    Example:
        >>> 48 in MultipleOf(16), 40 in MultipleOf(16)
        (True, False)
    """

    base: int

    def __contains__(self, size: int) -> bool:
        return size > 0 and size % self.base == 0


class DeviceCapability(NamedTuple):
    """The compute capability of a CUDA device."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """The device that a backend is chosen for: its kind and its capability.

    Attributes:
        type: "cpu" or "cuda".
        capability: compute capability of a CUDA device; None otherwise.
        num_sms: multiprocessors of a CUDA device; 0 otherwise.
    """

    type: str
    capability: DeviceCapability | None = None
    num_sms: int = 0

    def __post_init__(self) -> None:
        if (self.type, self.capability is None) not in (("cpu", True), ("cuda", False)):
            wanted = "there are backends for 'cuda' with one and for 'cpu'"
            raise Unsupported("type", f"is {self.type!r} with capability {self.capability}", wanted)

    @classmethod
    def of(cls, device: torch.device | str) -> DeviceInfo:
        """Returns the facts of a device of this machine; creates a CUDA context when it is a CUDA device.

        Raises:
            Unsupported: the device does not exist, or its type is not served.

        Example:
            >>> DeviceInfo.of("cpu").type
            'cpu'
        """
        device = torch.device(device)
        if device.type != "cuda":
            return cls(type=device.type)
        if not torch.cuda.is_available():
            raise Unsupported("device", f"is {device}, but torch finds no CUDA device on this machine", "use 'cpu'")
        properties = torch.cuda.get_device_properties(device)
        capability = DeviceCapability(properties.major, properties.minor)
        return cls(type="cuda", capability=capability, num_sms=properties.multi_processor_count)


class ContextGroup(Protocol):
    """The collectives of the ranks that share a layer's sequences; all ranks call them in the same order."""

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns the tensors of all ranks, joined along `dim` in the order of ranks."""
        ...

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Returns `[ranks, ...]`: from each rank the entry of its tensor's first axis that is for this rank."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """This rank's place among those that share sequences; given to a layer explicitly, never looked up globally.

    Attributes:
        dcp_world_size, dcp_rank: ranks that share the cached tokens of each sequence (decode context parallelism), and
            this one.
        pcp_world_size, pcp_rank: ranks that share the tokens of a prompt (prefill context parallelism), and this one.
        interleave_size: consecutive tokens that live on one rank.
        dcp_group: the ranks that share sequences; None if the caller merges the results of `forward_with_lse`.
        pcp_group: the ranks that share the tokens of a prompt.

    Raises:
        InvalidInput: a rank is not below its world size.
    """

    dcp_world_size: int = 1
    dcp_rank: int = 0
    pcp_world_size: int = 1
    pcp_rank: int = 0
    interleave_size: int = 1
    dcp_group: ContextGroup | None = None
    pcp_group: ContextGroup | None = None

    def __post_init__(self) -> None:
        for name in ("dcp", "pcp"):
            size, rank = getattr(self, f"{name}_world_size"), getattr(self, f"{name}_rank")
            if size < 1 or not 0 <= rank < size:
                wanted = "it must be from 0 to size - 1"
                raise InvalidInput(f"{name}_rank", f"is {rank} of {name}_world_size {size}", wanted)
        check_int("interleave_size", self.interleave_size, 1)

    def refuse_both_kinds(self) -> None:
        """Raises Unsupported when ranks share cached tokens and others the tokens of a prompt, or lack their group."""
        if self.pcp_world_size > 1 and (self.dcp_world_size > 1 or self.pcp_group is None):
            raise Unsupported(
                "pcp_world_size",
                f"is {self.pcp_world_size} and dcp_world_size {self.dcp_world_size}",
                "prompts are split over ranks with a pcp_group, and not over dcp ranks as well: use 1 for one of them",
            )

    @property
    def dcp_place(self) -> dict[str, int]:
        """The arguments of `torch_core.metadata` for this place: cached tokens are distributed over all ranks."""
        sizes = {"dcp_world_size": self.total_cp_world_size, "dcp_rank": self.total_cp_rank}
        return {**sizes, "interleave_size": self.interleave_size}

    @property
    def total_cp_world_size(self) -> int:
        """Ranks of both kinds together."""
        return self.pcp_world_size * self.dcp_world_size

    @property
    def total_cp_rank(self) -> int:
        """This rank's number among them."""
        return self.pcp_rank * self.dcp_world_size + self.dcp_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantKey:
    """A kind of output quantisation that may be fused into attention.

    Attributes:
        dtype: dtype of the quantised output.
        static: the scale is known before the step.
        group: the unit with one scale: "tensor", "token" or "block".
    """

    dtype: torch.dtype
    static: bool
    group: Literal["tensor", "token", "block"]


#: One known scale for the whole output, e4m3: the kind that the kernels store directly. vLLM: `kFp8StaticTensorSym`.
FP8_STATIC_TENSOR = QuantKey(dtype=torch.float8_e4m3fn, static=True, group="tensor")


def is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    """Returns whether a cache of this dtype holds scaled numbers rather than the real values.

    A name that is not in `CACHE_DTYPES` counts as quantised, so that its bytes are not read as plain numbers.

    Example:
        >>> is_quantized_kv_cache("fp8_e5m2"), is_quantized_kv_cache("auto")
        (True, False)
    """
    dtype = CACHE_DTYPES.get(kv_cache_dtype, torch.int8)
    return dtype is not None and dtype.itemsize == 1


def is_valid_kv_cache_layout(value: str) -> bool:
    """Returns whether a layout's name is known.

    Example:
        >>> is_valid_kv_cache_layout("NHD"), is_valid_kv_cache_layout("DHN")
        (True, False)
    """
    return value in get_args(KVCacheLayoutType)
