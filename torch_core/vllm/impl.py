"""The contract of an attention layer's implementation, and of the layer that it reads its scales from."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from torch_core.base.errors import InvalidInput
from torch_core.vllm.types import ContextParallel, QuantKey

#: The metadata of a step that an implementation reads.
T = TypeVar("T")


def as_heads(name: str, tensor: Tensor, num_heads: int, size: int) -> Tensor:
    """Returns [rows, num_heads, size], a view of that or of flat rows, or raises InvalidInput.

    A `view` by the number of elements would take other heads of as many elements, too.
    """
    check_tensor(name, tensor)
    shape = tuple(tensor.shape)
    if shape[1:] == (num_heads, size):
        return tensor
    if shape[1:] != (num_heads * size,):
        raise InvalidInput(name, f"has shape {shape}", f"it must be [num_tokens, {num_heads}, {size}], or flat")
    return tensor.unflatten(1, (num_heads, size))


def check_tensor(name: str, value: object) -> None:
    """Raises InvalidInput for another value than a tensor."""
    if not isinstance(value, Tensor):
        raise InvalidInput(name, f"is a {type(value).__name__}", "it must be a torch tensor")


def checked_scale(scale: float) -> float:
    """Returns the factor on the scores, or raises InvalidInput: vLLM's layers always give it."""
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise InvalidInput("scale", value=scale, wanted="it must be a number, usually head_size ** -0.5")
    return float(scale)


def check_metadata(metadata: object, wanted: type, impl: object) -> None:
    """Raises InvalidInput for metadata of another kind of layer."""
    if not isinstance(metadata, wanted):
        fix = f"{type(impl).__name__} reads {wanted.__name__}. Build it with the builder of the layer's own backend"
        raise InvalidInput("attn_metadata", f"is a {type(metadata).__name__}", fix)


class AttentionLayer(Protocol):
    """The layer that has the scales of an implementation; any module with these attributes works.

    Each scale is a one-element float32 tensor on the layer's device, and the same number on the host. A stored key
    times `_k_scale` is the real key, and so on.
    """

    @property
    def _q_scale(self) -> Tensor: ...
    @property
    def _k_scale(self) -> Tensor: ...
    @property
    def _v_scale(self) -> Tensor: ...
    @property
    def _q_scale_float(self) -> float: ...
    @property
    def _k_scale_float(self) -> float: ...
    @property
    def _v_scale_float(self) -> float: ...


@dataclass(frozen=True, slots=True)
class AttentionScales:
    """The plainest `AttentionLayer`: three scales and nothing else.

    Example:
        >>> AttentionScales.of(k_scale=0.5)._k_scale
        tensor([0.5000])
    """

    _q_scale: Tensor
    _k_scale: Tensor
    _v_scale: Tensor
    _q_scale_float: float
    _k_scale_float: float
    _v_scale_float: float

    @classmethod
    def of(
        cls, *, q_scale: float = 1.0, k_scale: float = 1.0, v_scale: float = 1.0, device: torch.device | str = "cpu"
    ) -> AttentionScales:
        """Returns the scales as tensors on `device` and as numbers."""
        numbers = (q_scale, k_scale, v_scale)
        q, k, v = (torch.full((1,), number, dtype=torch.float32, device=device) for number in numbers)
        return cls(q, k, v, *numbers)


class AttentionImplBase(ABC, Generic[T]):
    """The common parts of all implementations.

    Attributes:
        num_heads: query heads.
        head_size: elements of one head.
        scale: factor on the scores.
        context_parallel: this rank's place; given, not looked up.
        can_return_lse_for_decode: `forward_with_lse` exists, which merging over ranks needs.
        supports_pcp: prompts may be spread over ranks.
        supports_mtp_with_cp_non_trivial_interleave_size: several query tokens work with runs longer than one token.
        supports_quant_query_input: queries may come as fp8 with the layer's `_q_scale`.
    """

    num_heads: int
    head_size: int
    scale: float
    context_parallel: ContextParallel = ContextParallel()
    can_return_lse_for_decode: ClassVar[bool] = False
    supports_pcp: ClassVar[bool] = False
    supports_mtp_with_cp_non_trivial_interleave_size: ClassVar[bool] = False
    supports_quant_query_input: bool = False

    @property
    def need_to_return_lse_for_decode(self) -> bool:
        """Whether results must be merged over ranks before they are used."""
        return self.context_parallel.dcp_world_size > 1 and self.can_return_lse_for_decode

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Prepares values that depend on the weights, once these are loaded; does nothing by default."""
        del act_dtype  # For subclasses that absorb or convert weights.

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """Returns whether the output can be stored quantised in this way."""
        del quant_key  # No kind by default.
        return False


class AttentionImpl(AttentionImplBase[T]):
    """Multi-head attention over separate keys and values; subclasses add keyword-only arguments to the constructor."""

    kv_cache_dtype: str

    @abstractmethod
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None,
    ) -> None: ...  # fmt: skip

    @abstractmethod
    def forward(
        self, layer: AttentionLayer, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor | None,
        attn_metadata: T, output: Tensor | None = None, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Writes the step's keys and values to the cache, attends, writes `output` and returns it."""


class MLAAttentionImpl(AttentionImplBase[T]):
    """Multi-head latent attention: one compressed vector per token in the cache serves all heads.

    Prefill expands it to keys and values (`forward_mha`); decode absorbs the expansion into the query and attends to
    the compressed vectors themselves, as one KV head (`forward_mqa`). DeepSeek-V2, arXiv 2405.04434.
    """

    @abstractmethod
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
        kv_sharing_target_layer_name: str | None, *, q_lora_rank: int | None, kv_lora_rank: int,
        qk_nope_head_dim: int, qk_rope_head_dim: int, qk_head_dim: int, v_head_dim: int, kv_b_proj: torch.nn.Module,
        indexer: object | None = None,
    ) -> None: ...  # fmt: skip

    @abstractmethod
    def forward(
        self, layer: AttentionLayer, hidden_states_or_cq: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor,
        attn_metadata: T, output: Tensor | None = None, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Writes the step's compressed vectors to the cache, attends, writes `output` and returns it."""

    @abstractmethod
    def forward_mha(
        self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_c_and_k_pe_cache: Tensor, attn_metadata: T,
        k_scale: Tensor, output: Tensor, output_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attends for prefill rows, with expanded keys and values."""

    @abstractmethod
    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: T, layer: AttentionLayer
    ) -> tuple[Tensor, Tensor | None]:
        """Attends for decode rows, to the compressed vectors; returns the output and perhaps the lse."""

    @abstractmethod
    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:  # fmt: skip
        """Writes the compressed vectors and rotary keys of the step to the cache."""
