"""The contract of an attention backend: its supported features, its cache layout, and its classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import MAX_HEAD_SIZE, KVCacheSpec
from torch_core.vllm.types import (
    CACHE_DTYPES,
    PACKED_LATENTS,
    AttentionType,
    DeviceCapability,
    KVCacheLayoutType,
    MultipleOf,
)

if TYPE_CHECKING:
    from torch_core.vllm.builder import AttentionMetadataBuilder
    from torch_core.vllm.impl import AttentionImplBase

_MAX_BLOCK_SIZE = 256
_FP8_CAPABILITY = DeviceCapability(8, 9)


def always(answer: Any) -> Any:
    """Returns a class method without arguments that gives this answer."""
    return classmethod(lambda cls: answer)


class AttentionBackend(ABC):
    """A way to compute attention. Never instantiated: everything is asked of the class.

    Subclasses set the class attributes and override methods. The names are vLLM's (`vllm/v1/attention/backend.py`); the
    differences are listed in this folder's README.

    Attributes:
        supported_dtypes: dtypes of queries, keys and values.
        supported_kv_cache_dtypes: names of `CACHE_DTYPES`; none for any.
        supported_attn_types: kinds of attention.
        supported_head_sizes: a range or tuple; empty for any.
        device_type: the devices that the backend runs on, "cuda" or "cpu".
        min_capability: the lowest compute capability of a CUDA device, None for any.
        accept_output_buffer: `forward` writes into the tensor that it is given.
        forward_includes_kv_cache_update: `forward` writes the step's keys and values to the cache.
    """

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("auto", "float16", "bfloat16")
    supported_attn_types: ClassVar[tuple[AttentionType, ...]] = (AttentionType.DECODER,)
    supported_head_sizes: ClassVar[range | tuple[int, ...]] = range(1, MAX_HEAD_SIZE + 1)
    device_type: ClassVar[str] = "cuda"
    min_capability: ClassVar[DeviceCapability | None] = None
    accept_output_buffer: ClassVar[bool] = True
    forward_includes_kv_cache_update: ClassVar[bool] = True

    # Its purpose: latent attention only, chosen tokens only, state-space models.
    is_mla = is_sparse = is_ssm = always(False)
    # Further features: sinks, square-root ALiBi, bidirectional spans, a scale for each head; decoders without a causal
    # mask, results that never depend on the rest of the batch; blocks that leave the process.
    supports_sink = supports_alibi_sqrt = supports_mm_prefix = supports_per_head_quant_scales = always(False)
    supports_non_causal = supports_batch_invariance = always(False)
    supports_kv_connector = always(True)

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """Returns the backend's name, unique in a registry."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        """Returns the class whose instances are the layers' implementations."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Returns the class that builds the metadata of a step."""

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Returns the module and the qualified name of this class."""
        return cls.__module__, cls.__qualname__

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Returns the logical shape of one layer's cache, the same for all dtypes.

        Raises:
            InvalidInput: a size is out of range, or the backend does not serve a cache of this dtype.
        """
        cls._check_cache_dtype(cache_dtype_str)
        spec = KVCacheSpec(num_kv_heads=num_kv_heads, head_size=head_size, block_size=block_size, dtype="float32")
        return spec.shape(num_blocks)

    @classmethod
    def get_kv_cache_block_dim(
        cls, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> int:
        """Returns which axis of the cache counts blocks."""
        # A size that no other axis can have marks the axis.
        marker = (1 << 30) + 7
        return cls.get_kv_cache_shape(marker, block_size, num_kv_heads, head_size, cache_dtype_str).index(marker)

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Returns the axes in the order in which they lie in memory, outermost first.

        With the layers' dimension (an axis 0 in front of the logical shape) blocks are outermost, then layers, so that
        one block of all layers is one piece of memory, for transfers.
        """
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        """Returns whether blocks may lie apart: the kernels take the distance between blocks from the strides."""
        return cls.get_kv_cache_stride_order(include_num_layers_dimension=True)[0] != 0

    @classmethod
    def get_required_kv_cache_layout(cls) -> KVCacheLayoutType | None:
        """Returns the only order of tokens and heads that the backend reads; None when the strides decide."""
        return None

    @classmethod
    def get_supported_dtypes(cls) -> list[torch.dtype]:
        """Returns the dtypes of queries, keys and values that are served."""
        return list(cls.supported_dtypes)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Returns the head sizes that are served; an empty list for any."""
        return list(cls.supported_head_sizes)

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Returns the block sizes that the kernels take; an empty list for any."""
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Returns the default if it is served, else the smallest block size that is."""
        if cls.supports_block_size(default_block_size):
            return default_block_size
        sizes = cls.get_supported_kernel_block_sizes()
        return min(size.base if isinstance(size, MultipleOf) else size for size in sizes)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Returns whether a head size is served."""
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def validate_head_size(cls, head_size: int) -> None:
        """Raises InvalidInput for a head size that is not served."""
        if not cls.supports_head_size(head_size):
            served = _sizes(cls.get_supported_head_sizes())
            raise InvalidInput("head_size", f"is {head_size}", f"{cls.get_name()} serves {served}")

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """Returns whether queries, keys and values of this dtype are served."""
        return dtype in cls.get_supported_dtypes()

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Returns whether a cache of this dtype is served; None means for undecided."""
        return kv_cache_dtype is None or kv_cache_dtype in (cls.supported_kv_cache_dtypes or (kv_cache_dtype,))

    @classmethod
    def _check_cache_dtype(cls, cache_dtype_str: str) -> None:
        if not cls.supports_kv_cache_dtype(cache_dtype_str):
            wanted = f"{cls.get_name()} serves {', '.join(cls.supported_kv_cache_dtypes)}"
            raise InvalidInput("cache_dtype_str", value=cache_dtype_str, wanted=wanted)

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Returns whether blocks of this size are served; None means for undecided."""
        sizes = cls.get_supported_kernel_block_sizes() or [MultipleOf(1)]
        return block_size is None or (
            block_size <= _MAX_BLOCK_SIZE
            and any(block_size in size if isinstance(size, MultipleOf) else block_size == size for size in sizes)
        )

    @classmethod
    def supports_attn_type(cls, attn_type: AttentionType | str) -> bool:
        """Returns whether this kind of attention is served."""
        return attn_type in cls.supported_attn_types

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Returns whether a CUDA device of this capability is served."""
        return cls.min_capability is None or capability >= cls.min_capability

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None, use_mla: bool,
        has_sink: bool, use_sparse: bool, device_capability: DeviceCapability | None,
    ) -> str | None:  # fmt: skip
        """Returns why demands that are served one by one are not served together: fp8 caches on old devices."""
        del head_size, dtype, block_size, use_mla, has_sink, use_sparse
        stored = CACHE_DTYPES.get(kv_cache_dtype or "auto")
        is_fp8 = stored is not None and stored.is_floating_point and stored.itemsize == 1
        is_fp8 |= kv_cache_dtype == PACKED_LATENTS
        if not is_fp8 or device_capability is None or device_capability >= _FP8_CAPABILITY:
            return None
        return (
            f"kv_cache_dtype {kv_cache_dtype!r} needs compute capability {_FP8_CAPABILITY}; the device has "
            f"{device_capability}"
        )

    @classmethod
    def validate_configuration(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None, use_mla: bool,
        has_sink: bool, use_sparse: bool, use_mm_prefix: bool,
        device_capability: DeviceCapability | tuple[int, int] | None, attn_type: AttentionType | str, **demands: bool,
    ) -> list[str]:  # fmt: skip
        """Returns every reason why the backend cannot serve a layer on a device; empty when it can.

        Args are those of `AttentionSelectorConfig`, whose other demands may be given too; `device_capability` is that
        of a CUDA device, None for the CPU. Raises InvalidInput for a demand that there is not.

        Example:
            >>> from torch_core.vllm import TorchAttentionBackend
            >>> layer = dict(head_size=64, dtype=torch.float32, kv_cache_dtype="auto", block_size=16, use_mla=True)
            >>> layer |= dict(has_sink=False, use_sparse=False, use_mm_prefix=False, attn_type="decoder")
            >>> TorchAttentionBackend.validate_configuration(**layer, device_capability=None)
            ['it does not compute multi-head latent attention (use_mla)']
        """
        reasons = []
        demands |= {"has_sink": has_sink, "use_mm_prefix": use_mm_prefix}
        device = "cpu" if device_capability is None else "cuda"
        capability = None if device_capability is None else DeviceCapability(*device_capability)
        if device != cls.device_type:
            reasons.append(f"it runs on {cls.device_type} and the device is {device}")
        elif capability is not None and not cls.supports_compute_capability(capability):
            reasons.append(f"the device has compute capability {capability}; it needs {cls.min_capability}")
        if not cls.supports_head_size(head_size):
            reasons.append(f"head_size is {head_size}; it serves {_sizes(cls.get_supported_head_sizes())}")
        if not cls.supports_dtype(dtype):
            served = ", ".join(str(dtype).removeprefix("torch.") for dtype in cls.get_supported_dtypes())
            reasons.append(f"dtype is {str(dtype).removeprefix('torch.')}; it serves {served}")
        if not cls.supports_kv_cache_dtype(kv_cache_dtype):
            known = "" if kv_cache_dtype in CACHE_DTYPES else "unknown; "
            served = ", ".join(cls.supported_kv_cache_dtypes)
            reasons.append(f"kv_cache_dtype is {kv_cache_dtype!r}; {known}it serves {served}")
        if not cls.supports_block_size(block_size):
            served = " and ".join(
                f"multiples of {size.base}" if isinstance(size, MultipleOf) else str(size)
                for size in cls.get_supported_kernel_block_sizes()
            )
            reasons.append(f"block_size is {block_size}; it serves {served} up to {_MAX_BLOCK_SIZE}")
        if not cls.supports_attn_type(attn_type):
            served = ", ".join(kind.value for kind in cls.supported_attn_types)
            reasons.append(f"attn_type is {AttentionType(attn_type).value}; it serves {served}")
        if use_mla and not cls.is_mla():
            reasons.append("it does not compute multi-head latent attention (use_mla)")
        if cls.is_mla() and not use_mla:
            reasons.append("it computes multi-head latent attention only (use_mla)")
        if use_sparse != cls.is_sparse():
            reasons.append(f"it computes {'sparse' if cls.is_sparse() else 'dense'} attention only (use_sparse)")
        for name, (question, reason) in _DEMANDS.items():
            if demands.pop(name, False) and not getattr(cls, question)():
                reasons.append(f"{reason} ({name})")
        if demands:
            raise InvalidInput(next(iter(demands)), "is no demand on a backend", f"there are {', '.join(_DEMANDS)}")
        clash = cls.supports_combination(
            head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, capability
        )
        return reasons if clash is None else [*reasons, clash]


# Demand: the requirements of a layer, and a backend's reasons to refuse them.
_DEMANDS = {
    "has_sink": ("supports_sink", "it does not serve sinks"),
    "use_mm_prefix": ("supports_mm_prefix", "it does not serve bidirectional spans"),
    "use_alibi_sqrt": ("supports_alibi_sqrt", "it does not serve square-root ALiBi"),
    "use_per_head_quant_scales": ("supports_per_head_quant_scales", "it has one cache scale for all heads"),
    "use_non_causal": ("supports_non_causal", "its decoder attention is causal"),
    "use_batch_invariant": ("supports_batch_invariance", "its results depend on the batch"),
    "use_kv_connector": ("supports_kv_connector", "its blocks cannot leave the process"),
}


def _sizes(sizes: list[int]) -> str:
    if sizes == list(range(sizes[0], sizes[-1] + 1)):
        return f"{sizes[0]} to {sizes[-1]}"
    return ", ".join(map(str, sizes))
