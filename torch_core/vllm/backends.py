"""The backends, for keys and values and for latents: Triton for CUDA, torch for the CPU; and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import MAX_HEAD_SIZE, LatentCacheSpec
from torch_core.vllm.backend import AttentionBackend, always
from torch_core.vllm.builder import AttentionMetadataBuilder
from torch_core.vllm.config import AttentionSelectorConfig
from torch_core.vllm.mla import MLACommonMetadata
from torch_core.vllm.mla_builder import TorchMLAMetadataBuilder, TritonMLAMetadataBuilder
from torch_core.vllm.mla_impl import TorchMLAImpl, TritonMLAImpl
from torch_core.vllm.paged_builder import PagedAttentionMetadataBuilder
from torch_core.vllm.paged_impl import PagedAttentionImpl
from torch_core.vllm.paged_metadata import PagedAttentionMetadata
from torch_core.vllm.types import (
    CACHE_DTYPES,
    PACKED_LATENTS,
    AttentionCGSupport,
    AttentionType,
    DeviceCapability,
    DeviceInfo,
)

TorchAttentionMetadata = TritonAttentionMetadata = PagedAttentionMetadata
_MIN_HEAD_SIZE = 32


class TritonAttentionMetadataBuilder(PagedAttentionMetadataBuilder):
    """Builds the Triton backend's metadata; any batch can be replayed, since the kernels read lengths on the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


class TorchAttentionMetadataBuilder(PagedAttentionMetadataBuilder):
    """Builds the torch backend's metadata; there are no graphs on the CPU, and cascade never pays there."""

    # The CPU has no idle multiprocessors to win back.
    use_cascade_attention = AttentionMetadataBuilder.use_cascade_attention


class TritonAttentionImpl(PagedAttentionImpl):
    """One layer's attention by Triton kernels; arguments as for `PagedAttentionImpl`, `head_size` at least 32."""

    min_head_size: ClassVar[int] = _MIN_HEAD_SIZE


class TorchAttentionImpl(PagedAttentionImpl):
    """One layer's attention by plain torch; arguments as for `PagedAttentionImpl`."""


_PACKED_ROPE_DIM = 64


class _PagedAttentionBackend(AttentionBackend):
    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = tuple(CACHE_DTYPES)
    supported_attn_types: ClassVar[tuple[AttentionType, ...]] = tuple(AttentionType)
    get_metadata_cls = always(PagedAttentionMetadata)
    supports_sink = supports_alibi_sqrt = supports_mm_prefix = supports_non_causal = always(True)


class TritonAttentionBackend(_PagedAttentionBackend):
    """Attention by this project's Triton and Gluon kernels; on CPU tensors plain torch runs, for tests."""

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32)
    supported_head_sizes: ClassVar[range | tuple[int, ...]] = range(_MIN_HEAD_SIZE, MAX_HEAD_SIZE + 1)
    min_capability: ClassVar[DeviceCapability | None] = DeviceCapability(8, 0)
    get_name = staticmethod(lambda: "TRITON_ATTN")
    get_impl_cls = staticmethod(lambda: TritonAttentionImpl)
    get_builder_cls = staticmethod(lambda: TritonAttentionMetadataBuilder)
    # Keys are split by a fixed chunk size, independent of the batch.
    supports_batch_invariance = always(True)


class TorchAttentionBackend(_PagedAttentionBackend):
    """Attention by plain torch operations on the CPU."""

    device_type: ClassVar[str] = "cpu"
    get_name = staticmethod(lambda: "TORCH_ATTN")
    get_impl_cls = staticmethod(lambda: TorchAttentionImpl)
    get_builder_cls = staticmethod(lambda: TorchAttentionMetadataBuilder)


class _MLABackend(AttentionBackend):
    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16, torch.float32)
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = (*CACHE_DTYPES, PACKED_LATENTS)
    supported_head_sizes: ClassVar[range | tuple[int, ...]] = range(2, 641)
    get_metadata_cls = always(MLACommonMetadata)
    is_mla = always(True)

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Returns the shape of one layer's latents, `head_size` of each token, as `AttentionBackend` does.

        Packed rows ("fp8_ds_mla") are those of DeepSeek's rotary keys of 64 elements.
        """
        del num_kv_heads  # All heads share a latent.
        check_int("head_size", head_size, 1)
        cls._check_cache_dtype(cache_dtype_str)
        packed = cache_dtype_str == PACKED_LATENTS
        rope_dim, dtype = (_PACKED_ROPE_DIM, "uint8") if packed else (1, "float32")
        spec = LatentCacheSpec(kv_lora_rank=head_size - rope_dim, rope_dim=rope_dim, block_size=block_size, dtype=dtype)
        return spec.shape(num_blocks)

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Returns the axes in the order in which they lie in memory, as `AttentionBackend` does."""
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)


class TritonMLABackend(_MLABackend):
    """Multi-head latent attention by this project's kernels; on CPU tensors plain torch runs, for tests."""

    min_capability: ClassVar[DeviceCapability | None] = DeviceCapability(8, 0)
    get_name = staticmethod(lambda: "TRITON_MLA")
    get_impl_cls = staticmethod(lambda: TritonMLAImpl)
    get_builder_cls = staticmethod(lambda: TritonMLAMetadataBuilder)
    # Latents are split into chunks by the padded batch, not by its content.
    supports_batch_invariance = always(True)


class TorchMLABackend(_MLABackend):
    """Multi-head latent attention by plain torch operations on the CPU."""

    device_type: ClassVar[str] = "cpu"
    get_name = staticmethod(lambda: "TORCH_MLA")
    get_impl_cls = staticmethod(lambda: TorchMLAImpl)
    get_builder_cls = staticmethod(lambda: TorchMLAMetadataBuilder)


#: The backends of this project, the preferred one first. Pass a longer tuple to `select_backend` to add your own.
BACKENDS: tuple[type[AttentionBackend], ...] = (
    TritonAttentionBackend,
    TorchAttentionBackend,
    TritonMLABackend,
    TorchMLABackend,
)


def get_backend(name: str, *, backends: Sequence[type[AttentionBackend]] = BACKENDS) -> type[AttentionBackend]:
    """Returns the backend of a name.

    Raises:
        InvalidInput: there is none.

    Example:
        >>> get_backend("TORCH_ATTN").__name__
        'TorchAttentionBackend'
    """
    for backend in backends:
        if backend.get_name() == name:
            return backend
    known = ", ".join(backend.get_name() for backend in backends)
    raise InvalidInput("name", value=name, wanted=f"there are {known}")


def select_backend(
    config: AttentionSelectorConfig,
    device: DeviceInfo | torch.device | str,
    *,
    backends: Sequence[type[AttentionBackend]] = BACKENDS,
) -> type[AttentionBackend]:
    """Returns the first backend that serves a layer on a device.

    Args:
        config: the layer's requirements.
        device: a device of this machine, or the facts of one.
        backends: the candidates, the preferred one first.

    Raises:
        Unsupported: none serves it; the message lists every backend with all of its reasons.

    Example:
        >>> config = AttentionSelectorConfig(num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.float32)
        >>> select_backend(config, "cpu").get_name()
        'TORCH_ATTN'
    """
    if not isinstance(device, DeviceInfo):
        device = DeviceInfo.of(device)
    refusals, demands = [], asdict(config)
    for name in ("num_heads", "num_kv_heads"):
        del demands[name]
    for backend in backends:
        reasons = backend.validate_configuration(**demands, device_capability=device.capability)
        if not reasons:
            return backend
        refusals.append(f"{backend.get_name()}: {'; '.join(reasons)}.")
    raise Unsupported("No attention backend serves this layer. " + " ".join(refusals), argument="config")


def subclass_attention_backend(
    name_prefix: str, attention_backend_cls: type[AttentionBackend], builder_cls: type[AttentionMetadataBuilder]
) -> type[AttentionBackend]:
    """Returns a subclass of a backend, named with a prefix, that builds its metadata with another class.

    Example:
        >>> builder = TorchAttentionBackend.get_builder_cls()
        >>> subclass_attention_backend("My", TorchAttentionBackend, builder).__name__
        'MyTorchAttentionBackend'
    """
    return subclass_attention_backend_with_overrides(
        name_prefix, attention_backend_cls, {"get_builder_cls": staticmethod(lambda: builder_cls)}
    )


def subclass_attention_backend_with_overrides(
    name_prefix: str, attention_backend_cls: type[AttentionBackend], overrides: dict[str, Any]
) -> type[AttentionBackend]:
    """Returns a subclass of a backend, named with a prefix, whose attributes `overrides` replaces."""
    return type(name_prefix + attention_backend_cls.__name__, (attention_backend_cls,), overrides)
