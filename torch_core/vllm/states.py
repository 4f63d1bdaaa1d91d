"""The metadata of layers with a recurrent state, by the names of vLLM's builders for them, and these builders.

They follow vLLM 0.33, without the plans of its kernels. A row without earlier tokens is a prefill, also of one token:
its slot has the state of another sequence. Slots of padding are -1, where vLLM has 0 or -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import StateCacheSpec
from torch_core.metadata import CommonAttentionMetadata, split_decodes_and_prefills
from torch_core.vllm.buffers import check_common, upload
from torch_core.vllm.builder import AttentionMetadataBuilder, M
from torch_core.vllm.types import AttentionCGSupport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearAttentionMetadata:
    """The batch of linear attention (vLLM: `v1/attention/backends/linear_attn.py`). Decodes come first.

    Attributes:
        num_prefills, num_prefill_tokens: rows with several new tokens, and their tokens.
        num_decodes, num_decode_tokens: rows with one new token, and their tokens; padding too, without prefills.
        query_start_loc: int32[num_seqs + 1].
        seq_lens: int32[num_seqs].
        state_indices_tensor: int32[num_seqs]; slot of each sequence, -1 for padding.
        has_initial_state: bool[num_seqs]; whether a sequence continues from the state in its slot.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    state_indices_tensor: Tensor
    has_initial_state: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GDNAttentionMetadata:
    """The batch of Gated DeltaNet (vLLM: `v1/attention/backends/gdn_attn.py`). Decodes come first.

    A spec decode verifies drafts with a slot for each of its tokens; without `spec_state_indices` there is none. With
    one slot for each sequence, rows that verify drafts are prefills, and `num_kept_tokens` of this project's ops says
    which state is kept.

    Attributes:
        num_prefills, num_prefill_tokens: other rows; with spec decodes all of them.
        num_decodes, num_decode_tokens: other rows with one new token and a state; padding too, without prefills.
        num_actual_tokens: new tokens without padding.
        has_initial_state: bool[other rows]; whether a sequence continues from the state in its slot.
        non_spec_query_start_loc: int32[other rows + 1]; None if all are spec decodes, and so is the next field.
        non_spec_state_indices_tensor: int32[other rows]; slot of each sequence, -1 for padding.
        prefill_query_start_loc: int32[num_prefills + 1], counted from the first prefill; None without prefills, and so
            are the next two fields.
        prefill_state_indices: int32[num_prefills]; slots.
        prefill_has_initial_state: bool[num_prefills].
        num_spec_decodes, num_spec_decode_tokens: spec decodes and their tokens.
        spec_query_start_loc: int32[num_spec_decodes + 1]; None without spec decodes, and so are all further fields.
        spec_state_indices_tensor: int32[num_spec_decodes, 1 + num_speculative_tokens]; slots.
        spec_sequence_masks: bool[num_reqs]; on the host as spec_sequence_masks_cpu.
        spec_token_indx, non_spec_token_indx: int64; places of the tokens of spec decodes, and of the others.
        num_accepted_tokens: int32[num_spec_decodes]; those of the last step.
        uniform_spec_sequence_length: tokens of each spec decode; None if they differ.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_actual_tokens: int
    has_initial_state: Tensor
    non_spec_query_start_loc: Tensor | None
    non_spec_state_indices_tensor: Tensor | None
    prefill_query_start_loc: Tensor | None = None
    prefill_state_indices: Tensor | None = None
    prefill_has_initial_state: Tensor | None = None
    num_spec_decodes: int = 0
    num_spec_decode_tokens: int = 0
    spec_query_start_loc: Tensor | None = None
    spec_state_indices_tensor: Tensor | None = None
    spec_sequence_masks: Tensor | None = None
    spec_sequence_masks_cpu: Tensor | None = None
    spec_token_indx: Tensor | None = None
    non_spec_token_indx: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    uniform_spec_sequence_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShortConvAttentionMetadata:
    """The batch of a short convolution (vLLM: `v1/attention/backends/short_conv_attn.py`). Decodes come first.

    The fields that end in `_d` are of decodes, those in `_p` of prefills; None if there are none.

    Attributes:
        num_prefills, num_prefill_tokens: rows with several new tokens or without a state, all rows after the first such
            one, and their tokens.
        num_decodes, num_decode_tokens: rows with one new token, or with drafts that have a slot for each token, and
            their tokens; padding too, without prefills.
        num_reqs: rows without padding.
        seq_lens: int32[num_seqs].
        query_start_loc_d: int32[num_decodes + 1].
        state_indices_tensor_d: int32[num_decodes, 1]; slots, -1 for padding. With drafts int32[num_decodes, 1 +
            num_speculative_tokens].
        query_start_loc_p: int32[num_prefills + 1], counted from the first prefill.
        state_indices_tensor_p: int32[num_prefills]; slots.
        has_initial_states_p: bool[num_prefills]; whether a sequence continues from the state in its slot.
        num_accepted_tokens: int32[num_decodes]; those of the last step. None without slots of drafts.
        cu_chunk_seqlen_p, last_chunk_indices_p: Mamba-2's chunks; None of other layers.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_reqs: int
    seq_lens: Tensor
    query_start_loc_d: Tensor | None
    state_indices_tensor_d: Tensor | None
    query_start_loc_p: Tensor | None
    state_indices_tensor_p: Tensor | None
    has_initial_states_p: Tensor | None
    num_accepted_tokens: Tensor | None = None
    cu_chunk_seqlen_p: Tensor | None = None
    last_chunk_indices_p: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mamba1AttentionMetadata(ShortConvAttentionMetadata):
    """The batch of Mamba-1 (vLLM: `v1/attention/backends/mamba1_attn.py`): that of a convolution."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mamba2AttentionMetadata(ShortConvAttentionMetadata):
    """The batch of Mamba-2 (vLLM: `v1/attention/backends/mamba2_attn.py`): that of a convolution, and chunks.

    Attributes:
        chunk_size: most tokens of a chunk. A chunk has tokens of one sequence and ends at a multiple of this position.
        prep_initial_states: whether any prefill continues from a state.
        cu_chunk_seqlen_p: int32[num_chunks + 1]; offset of each chunk among the prefills' tokens.
        seq_idx_p: int32[num_chunks]; the prefill of each chunk.
        last_chunk_indices_p: int32[num_prefills]; the last chunk of each prefill.
    """

    chunk_size: int
    prep_initial_states: bool
    seq_idx_p: Tensor | None


class _Drafts(NamedTuple):
    """The arguments of `StateMetadataBuilder.build` about drafts."""

    num_accepted_tokens: Tensor
    num_decode_draft_tokens_cpu: Tensor
    spec_state_indices: Tensor


class StateMetadataBuilder(AttentionMetadataBuilder[M]):
    """The common part of the builders for layers with a state. Args are those of `AttentionMetadataBuilder`.

    A captured graph reads the memory of `has_initial_state`: call `build` with the arrays of `StepBuffers` before each
    replay, and give the configuration a `max_num_seqs`.

    Raises:
        InvalidInput: the specification is not of states.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1

    def _set_up(self) -> None:
        if not isinstance(self.kv_cache_spec, StateCacheSpec):
            wanted = f"{type(self).__name__} is for layers with a recurrent state: give a StateCacheSpec"
            raise InvalidInput("kv_cache_spec", f"is a {type(self.kv_cache_spec).__name__}", wanted)
        self._continues = torch.zeros(self.vllm_config.max_num_seqs or 0, dtype=torch.bool, device=self.device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        *,
        arrays: Mapping[str, Tensor] | None = None,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        spec_state_indices: Tensor | None = None,
    ) -> M:
        """See `AttentionMetadataBuilder.build`; a shared prefix makes no difference, and the build is always fast.

        Args:
            common_prefix_len, common_attn_metadata, fast_build, arrays: as there.
            num_accepted_tokens: int32[num_reqs]; tokens that a row's last step kept, the sampled one included.
            num_decode_draft_tokens_cpu: int[num_reqs]; drafted tokens of each row, -1 of a row that verifies none.
            spec_state_indices: int32[num_reqs, 1 + num_speculative_tokens]; a slot for the state after each new token,
                which vLLM has in the block table. None, with one slot for each sequence, ignores both others.

        Raises:
            InvalidInput: the batch has no state slots, or decodes after prefills; arrays of another batch.
            Unsupported: slots of drafts for linear attention.
        """
        del common_prefix_len, fast_build  # A state is read whole, and there is no slower build.
        common = common_attn_metadata
        check_common("common_attn_metadata", common)
        if common.state_slots is None:
            wanted = f"{self._layers()} need them: build it with num_slots, from rows that have a state_slot"
            raise InvalidInput("common_attn_metadata", "has no state_slots", wanted)
        if spec_state_indices is None:
            return self._made(common, self._counts(common), self._on_device(common, arrays))
        shapes = (common.num_reqs,), (common.num_reqs,), (common.num_reqs, 1 + self.vllm_config.num_speculative_tokens)
        given = num_accepted_tokens, num_decode_draft_tokens_cpu, spec_state_indices
        for name, array, shape in zip(_Drafts._fields, given, shapes, strict=True):
            if array is None or tuple(array.shape) != shape:
                problem = "is None" if array is None else f"has shape {list(array.shape)}"
                raise InvalidInput(name, problem, f"with spec_state_indices it must be {list(shape)}")
        return self._made_with_drafts(common, _Drafts(*given), arrays)  # type: ignore[arg-type]

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata, *, arrays: Mapping[str, Tensor] | None = None
    ) -> M:
        """Returns the metadata to capture a CUDA graph with: of decodes, also if the rows have no earlier tokens."""
        counts = self._counts(common_attn_metadata, decodes_have_states=False)
        return self._made(common_attn_metadata, counts, self._on_device(common_attn_metadata, arrays))

    def _counts(
        self, common: CommonAttentionMetadata, num_drafts: Tensor | None = None, *, decodes_have_states: bool = True
    ) -> dict[str, int]:
        """Returns the numbers of decodes and prefills; rows that verify drafts are decodes if these are given."""
        # It refuses decodes after prefills.
        split_decodes_and_prefills(common, 1 + (num_drafts is not None) * self.vllm_config.num_speculative_tokens)
        count = common.num_reqs
        is_decode = common.query_lens[:count] <= 1
        if num_drafts is not None:
            is_decode |= num_drafts.cpu().numpy() >= 0
        if decodes_have_states:
            is_decode &= common.compute_num_computed_tokens()[:count] > 0
        if is_decode.all():
            # Padding belongs to the decodes then: graphs are captured and replayed with it.
            rows, tokens, count, end = common.num_seqs, common.num_tokens, common.num_seqs, common.num_tokens
        else:
            rows, end = int(is_decode.argmin()), common.num_actual_tokens
            tokens = int(common.query_start_loc[rows])
        return {
            "num_decodes": rows,
            "num_prefills": count - rows,
            "num_decode_tokens": tokens,
            "num_prefill_tokens": end - tokens,
        }

    def _on_device(self, common: CommonAttentionMetadata, arrays: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Returns the batch on the device, and the rows that have a state."""
        if arrays is None:
            # No captured graph reads memory that is new in each step, and steps may be built before earlier ones run.
            uploaded = dict(upload(common, self.device))
            return {**uploaded, "has_initial_state": uploaded["seq_lens"] > uploaded["query_start_loc"].diff()}
        on_device = dict(arrays)
        if self._continues.numel() < common.num_seqs:
            self._continues = torch.zeros(common.num_seqs, dtype=torch.bool, device=self.device)
        query_lens = on_device["query_start_loc"].diff()
        on_device["has_initial_state"] = torch.gt(
            on_device["seq_lens"], query_lens, out=self._continues[: common.num_seqs]
        )
        return on_device

    def _made(self, common: CommonAttentionMetadata, counts: dict[str, Any], arrays: Mapping[str, Tensor]) -> M:
        raise NotImplementedError

    def _made_with_drafts(
        self, common: CommonAttentionMetadata, drafts: _Drafts, arrays: Mapping[str, Tensor] | None
    ) -> M:
        """Rows with drafts are decodes of several tokens."""
        counts, on_device = self._counts(common, drafts.num_decode_draft_tokens_cpu), self._on_device(common, arrays)
        rows = min(counts["num_decodes"], common.num_reqs)
        found: Any = self._made(common, counts, on_device)
        return replace(
            found,
            state_indices_tensor_d=drafts.spec_state_indices[:rows] if rows else None,
            query_start_loc_d=on_device["query_start_loc"][: rows + 1] if rows else None,
            num_accepted_tokens=drafts.num_accepted_tokens[:rows] if rows else None,
        )


class LinearAttentionMetadataBuilder(StateMetadataBuilder[LinearAttentionMetadata]):
    """Builds `LinearAttentionMetadata`, which has no fields of drafts."""

    def _made_with_drafts(
        self, common: CommonAttentionMetadata, drafts: _Drafts, arrays: Mapping[str, Tensor] | None
    ) -> Any:
        raise Unsupported("spec_state_indices", "is given", "linear attention has one slot for each sequence")

    def _made(self, common: CommonAttentionMetadata, counts: dict[str, Any], arrays: Mapping[str, Tensor]) -> Any:
        return LinearAttentionMetadata(
            **counts,
            query_start_loc=arrays["query_start_loc"],
            seq_lens=arrays["seq_lens"],
            state_indices_tensor=arrays["state_slots"],
            has_initial_state=arrays["has_initial_state"],
        )


class GDNAttentionMetadataBuilder(StateMetadataBuilder[GDNAttentionMetadata]):
    """Builds `GDNAttentionMetadata`."""

    def build(  # type: ignore[override]
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        fast_build: bool = False,
        **options: Any,
    ) -> GDNAttentionMetadata:
        """See `StateMetadataBuilder.build`; the order of the arguments is that of vLLM's builder of this name."""
        options |= {"num_accepted_tokens": num_accepted_tokens}
        options |= {"num_decode_draft_tokens_cpu": num_decode_draft_tokens_cpu}
        return super().build(common_prefix_len, common_attn_metadata, fast_build, **options)

    def _made(self, common: CommonAttentionMetadata, counts: dict[str, Any], arrays: Mapping[str, Tensor]) -> Any:
        starts, slots, continues = (arrays[name] for name in ("query_start_loc", "state_slots", "has_initial_state"))
        prefills: dict[str, Any] = {}
        if counts["num_prefills"]:
            first, end = counts["num_decodes"], common.num_reqs
            prefills["prefill_query_start_loc"] = starts[first : end + 1] - counts["num_decode_tokens"]
            prefills["prefill_state_indices"] = slots[first:end]
            prefills["prefill_has_initial_state"] = continues[first:end]
        return GDNAttentionMetadata(
            **counts,
            num_actual_tokens=common.num_actual_tokens,
            has_initial_state=continues,
            non_spec_query_start_loc=starts,
            non_spec_state_indices_tensor=slots,
            **prefills,
        )

    def _made_with_drafts(
        self, common: CommonAttentionMetadata, drafts: _Drafts, arrays: Mapping[str, Tensor] | None
    ) -> Any:
        on_device = self._on_device(common, arrays)
        num_reqs, lens = common.num_reqs, torch.from_numpy(common.query_lens[: common.num_reqs]).long()
        is_spec = drafts.num_decode_draft_tokens_cpu.cpu() >= 0
        if not is_spec.any():
            return self._made(common, self._counts(common), on_device)
        of_tokens = torch.repeat_interleave(is_spec, lens)
        num_prefills, num_spec_tokens, spec_lens = int((~is_spec).sum()), int(of_tokens.sum()), lens[is_spec]
        spec, other = is_spec.to(self.device), (~is_spec).to(self.device)

        def starts(lens: Tensor) -> Tensor:
            return torch.cat([lens.new_zeros(1), lens.cumsum(0)]).to(self.device, torch.int32)

        continues = on_device["has_initial_state"][:num_reqs][other]
        # A prefill's kernels take one token with a state too.
        prefills = starts(lens[~is_spec]), on_device["state_slots"][:num_reqs][other], continues
        prefill_starts, slots, prefill_continues = prefills if num_prefills else (None, None, None)
        return GDNAttentionMetadata(
            num_prefills=num_prefills,
            num_prefill_tokens=len(of_tokens) - num_spec_tokens,
            num_decodes=0,
            num_decode_tokens=0,
            num_actual_tokens=common.num_actual_tokens,
            has_initial_state=continues,
            non_spec_query_start_loc=prefill_starts,
            non_spec_state_indices_tensor=slots,
            prefill_query_start_loc=prefill_starts,
            prefill_state_indices=slots,
            prefill_has_initial_state=prefill_continues,
            num_spec_decodes=int(is_spec.sum()),
            num_spec_decode_tokens=num_spec_tokens,
            spec_query_start_loc=starts(spec_lens),
            spec_state_indices_tensor=drafts.spec_state_indices[spec],
            spec_sequence_masks=spec,
            spec_sequence_masks_cpu=is_spec,
            spec_token_indx=of_tokens.nonzero()[:, 0].to(self.device),
            non_spec_token_indx=(~of_tokens).nonzero()[:, 0].to(self.device),
            num_accepted_tokens=drafts.num_accepted_tokens[spec],
            uniform_spec_sequence_length=int(spec_lens[0]) if bool((spec_lens == spec_lens[0]).all()) else None,
        )


class ShortConvAttentionMetadataBuilder(StateMetadataBuilder[ShortConvAttentionMetadata]):
    """Builds `ShortConvAttentionMetadata`."""

    def _made(self, common: CommonAttentionMetadata, counts: dict[str, Any], arrays: Mapping[str, Tensor]) -> Any:
        return ShortConvAttentionMetadata(**_parts(common, counts, arrays))


class Mamba1AttentionMetadataBuilder(StateMetadataBuilder[Mamba1AttentionMetadata]):
    """Builds `Mamba1AttentionMetadata`."""

    def _made(self, common: CommonAttentionMetadata, counts: dict[str, Any], arrays: Mapping[str, Tensor]) -> Any:
        return Mamba1AttentionMetadata(**_parts(common, counts, arrays))


class Mamba2AttentionMetadataBuilder(StateMetadataBuilder[Mamba2AttentionMetadata]):
    """Builds `Mamba2AttentionMetadata`; the configuration has a `mamba_chunk_size`.

    Raises:
        InvalidInput: the configuration has none.
    """

    def _set_up(self) -> None:
        super()._set_up()
        self.chunk_size: Any = self.vllm_config.mamba_chunk_size
        check_int("mamba_chunk_size", self.chunk_size, 1)

    def _made(self, common: CommonAttentionMetadata, counts: dict[str, Any], arrays: Mapping[str, Tensor]) -> Any:
        chunks: dict[str, Any] = dict.fromkeys(("cu_chunk_seqlen_p", "seq_idx_p", "last_chunk_indices_p"))
        continues = False
        if counts["num_prefills"]:
            prefills = slice(common.num_reqs - counts["num_prefills"], common.num_reqs)
            computed = common.compute_num_computed_tokens()[prefills]
            continues = bool(computed.any())
            found = chunks_of(computed, common.query_lens[prefills], self.chunk_size)
            chunks = {name: torch.from_numpy(each).to(self.device) for name, each in zip(chunks, found, strict=True)}
        return Mamba2AttentionMetadata(
            **_parts(common, counts, arrays), chunk_size=self.chunk_size, prep_initial_states=continues, **chunks
        )


def chunks_of(computed: np.ndarray, new: np.ndarray, chunk_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the chunks of some sequences, one after the other, as int32 arrays.

    Args:
        computed: int32[num_seqs], tokens of each sequence before the step.
        new: int32[num_seqs], its new tokens, at least one.
        chunk_size: a chunk ends at each multiple of this position, and at a sequence's end.

    Returns:
        The first token of each chunk and the end of the last one, [num_chunks + 1]; the sequence of each chunk,
        [num_chunks]; the last chunk of each sequence, [num_seqs].

    Example:
        >>> [found.tolist() for found in chunks_of(np.array([3, 0]), np.array([6, 2]), 4)]
        [[0, 1, 5, 6, 8], [0, 0, 0, 1], [2, 3]]
    """
    counts = -(-(computed + new) // chunk_size) - computed // chunk_size
    sequences = np.arange(len(new)).repeat(counts)
    last = counts.cumsum() - 1
    index = np.arange(counts.sum()) - (last - counts + 1)[sequences]
    ends = np.minimum(
        (computed // chunk_size)[sequences] * chunk_size + (index + 1) * chunk_size, (computed + new)[sequences]
    )
    offsets = ends - computed[sequences] + (new.cumsum() - new)[sequences]
    starts = np.concatenate([[0], offsets])
    return starts.astype(np.int32), sequences.astype(np.int32), last.astype(np.int32)


def _parts(common: CommonAttentionMetadata, counts: dict[str, Any], arrays: Mapping[str, Tensor]) -> dict[str, Any]:
    rows, prefills = counts["num_decodes"], counts["num_prefills"]
    starts, slots = arrays["query_start_loc"], arrays["state_slots"]
    end = rows + prefills
    return {
        **counts,
        "num_reqs": common.num_reqs,
        "seq_lens": arrays["seq_lens"],
        "query_start_loc_d": starts[: rows + 1] if rows else None,
        "state_indices_tensor_d": slots[:rows, None] if rows else None,
        "query_start_loc_p": starts[rows : end + 1] - counts["num_decode_tokens"] if prefills else None,
        "state_indices_tensor_p": slots[rows:end] if prefills else None,
        "has_initial_states_p": arrays["has_initial_state"][rows:end] if prefills else None,
    }
