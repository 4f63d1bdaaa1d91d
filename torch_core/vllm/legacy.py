"""The helpers of vLLM's older attention stack under their own names and arguments.

They come from `vllm/attention/backends/utils.py` before its second engine. Code that was written for them finds them
here; nothing else in this project uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import PAD_SLOT_ID
from torch_core.vllm.types import AttentionType


def is_block_tables_empty(block_tables: Mapping[Any, Any] | None) -> bool:
    """Returns whether there are no block tables: None, or a mapping to None alone (a profiling run).

    Example:
        >>> is_block_tables_empty({0: None}), is_block_tables_empty({0: [3]})
        (True, False)
    """
    if isinstance(block_tables, Mapping):
        return all(table is None for table in block_tables.values())
    return block_tables is None


def compute_slot_mapping_start_idx(
    is_prompt: bool, query_len: int, context_len: int, sliding_window: int | None
) -> int:
    """Returns the first position of a prompt that gets a slot: the last `sliding_window` of its new tokens do.

    As in vLLM the context does not move it, though the positions that it is compared with begin there.

    Example:
        >>> compute_slot_mapping_start_idx(True, 6, 5, 4), compute_slot_mapping_start_idx(False, 1, 9, 4)
        (2, 0)
    """
    del context_len
    return max(0, query_len - sliding_window) if is_prompt and sliding_window is not None else 0


def compute_slot_mapping(
    is_profile_run: bool, slot_mapping: list[int], seq_id: int, seq_len: int, context_len: int, start_idx: int,
    block_size: int, block_tables: Mapping[int, Sequence[int]] | None,
) -> None:  # fmt: skip
    """Appends the slots of a sequence's new tokens to `slot_mapping`.

    In a profiling run, where there are no tables, every token of the sequence gets -1; otherwise those before
    `start_idx` do.

    Raises:
        InvalidInput: the table of the sequence is missing or too short; nothing is appended.

    Example:
        >>> slots = []
        >>> compute_slot_mapping(False, slots, 0, 10, 0, 2, 4, {0: [0, 1, 0]})
        >>> slots
        [-1, -1, 2, 3, 4, 5, 6, 7, 0, 1]
    """
    if is_profile_run:
        slot_mapping.extend([PAD_SLOT_ID] * seq_len)
        return
    table = (block_tables or {}).get(seq_id) or ()
    first = max(start_idx, context_len)
    if seq_len > first and len(table) * block_size < seq_len:
        wanted = f"the sequence has {seq_len} tokens"
        raise InvalidInput(f"block_tables[{seq_id}]", f"has {len(table)} blocks of {block_size}", wanted)
    positions = np.arange(first, seq_len)
    slots = np.asarray(table, np.int64)[positions // block_size] * block_size + positions % block_size
    slot_mapping.extend([PAD_SLOT_ID] * max(0, start_idx - context_len))
    slot_mapping.extend(slots.tolist())


class CommonMetadataBuilder:
    """Collects the sequences of a step, group by group, then builds the metadata that a subclass names.

    A subclass sets `_metadata_cls`, a class that takes the keywords of `build`. The engine's values are read by their
    attributes: the builder's runner (device, pin_memory, graph_block_tables), sliding_window, block_size,
    inter_data_list and chunked_prefill_enabled.

    Attributes:
        num_prefills, num_prefill_tokens: sequences of prompts, and their new tokens.
        num_decode_tokens: the other sequences' new tokens, one of each.
        context_lens: tokens before the step, by sequence.
        prefill_seq_lens, curr_seq_lens: lengths of the prompts, and of the others after the step.
        block_tables: block tables that attention may read, by sequence.
        slot_mapping: slots of all new tokens.
        multimodal_placeholder_maps: the engine's placeholder maps by modality.
    """

    _metadata_cls: ClassVar[Callable[..., Any]]

    def __init__(self, input_builder: Any) -> None:
        self.input_builder = input_builder
        self.runner = input_builder.runner
        self.sliding_window = input_builder.sliding_window
        self.block_size = input_builder.block_size

    def prepare(self) -> None:
        """Forgets the sequences of the step before."""
        self.slot_mapping: list[int] = []
        self.prefill_seq_lens: list[int] = []
        self.context_lens: list[int] = []
        self.block_tables: list[Sequence[int]] = []
        self.curr_seq_lens: list[int] = []
        self.multimodal_placeholder_maps: dict[str, Any] = {}
        self.num_prefills = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0

    def _add_seq_group(self, inter_data: Any, chunked_prefill_enabled: bool) -> None:
        """Adds a group: prompts, or sequences with one new token; InvalidInput for others.

        Attention reads the whole table of a sequence that hit the prefix cache; no table of another prompt, unless
        chunked prefill is on; and of the rest the last `curr_sliding_window_block` blocks, where that is not 0.
        """
        tables, is_prompt = inter_data.block_tables, inter_data.is_prompt
        columns = "seq_ids input_tokens orig_seq_lens seq_lens query_lens context_lens curr_sliding_window_blocks"
        for seq_id, tokens, seq_len, curr_seq_len, query_len, context_len, window_blocks in zip(
            *(getattr(inter_data, name) for name in columns.split()), strict=True
        ):
            if not is_prompt and query_len != 1:
                wanted = "one that is not a prompt has one new token"
                raise InvalidInput("query_lens", f"of sequence {seq_id} is {query_len}", wanted)
            start = compute_slot_mapping_start_idx(is_prompt, query_len, context_len, self.sliding_window)
            where = (seq_id, seq_len, context_len, start, self.block_size, tables)
            compute_slot_mapping(is_block_tables_empty(tables), self.slot_mapping, *where)
            self.context_lens.append(context_len)
            if is_prompt:
                for modality, placeholders in (inter_data.multi_modal_placeholder_maps or {}).items():
                    self.multimodal_placeholder_maps.setdefault(modality, type(placeholders)()).extend(placeholders)
                self.num_prefills += 1
                self.num_prefill_tokens += len(tokens)
                self.prefill_seq_lens.append(seq_len)
            else:
                self.num_decode_tokens += query_len
                self.curr_seq_lens.append(curr_seq_len)
            seen = inter_data.prefix_cache_hit or chunked_prefill_enabled or not is_prompt
            table = ((tables or {}).get(seq_id) if seen else None) or []
            self.block_tables.append(table if inter_data.prefix_cache_hit else table[-window_blocks:])

    def build(self, seq_lens: list[int], query_lens: list[int], cuda_graph_pad_size: int, batch_size: int) -> Any:
        """Returns the metadata of the input builder's groups, with tensors on the runner's device.

        Args:
            seq_lens: lengths of each sequence, perhaps padded.
            query_lens: lengths of each sequence.
            cuda_graph_pad_size: padding tokens, to reach a captured batch size; -1 for no graph.
            batch_size: sequences, perhaps padded; with a graph, the rows of the runner's `graph_block_tables` that are
                written and taken.

        Raises:
            InvalidInput: there is no query; see `_add_seq_group`.
        """
        if not any(query_lens):
            raise InvalidInput("query_lens", f"is {query_lens}", "a step has at least one new token")
        for inter_data in self.input_builder.inter_data_list:
            self._add_seq_group(inter_data, self.input_builder.chunked_prefill_enabled)
        use_captured_graph = cuda_graph_pad_size != -1
        if use_captured_graph:
            self.slot_mapping.extend([PAD_SLOT_ID] * cuda_graph_pad_size)
            tables = self.runner.graph_block_tables[:batch_size]
        else:
            tables = np.zeros((len(self.block_tables), max(map(len, self.block_tables), default=0)), np.int32)
        for row, table in enumerate(self.block_tables):
            tables[row, : len(table)] = table
        return self._metadata_cls(
            num_prefills=self.num_prefills,
            slot_mapping=self._on_device(self.slot_mapping, torch.long),
            multi_modal_placeholder_index_maps={
                modality: placeholders.index_map()
                for modality, placeholders in self.multimodal_placeholder_maps.items()
            },
            enable_kv_scales_calculation=True,
            num_prefill_tokens=self.num_prefill_tokens,
            num_decode_tokens=batch_size if use_captured_graph else self.num_decode_tokens,
            seq_lens=seq_lens,
            seq_lens_tensor=self._on_device(seq_lens),
            max_query_len=max(query_lens),
            max_prefill_seq_len=max(self.prefill_seq_lens, default=0),
            max_decode_seq_len=max(self.curr_seq_lens, default=0),
            query_start_loc=self._on_device(list(accumulate(query_lens, initial=0))),
            seq_start_loc=self._on_device(list(accumulate(seq_lens, initial=0))),
            context_lens_tensor=self._on_device(self.context_lens),
            block_tables=torch.from_numpy(tables).to(self.runner.device, non_blocking=True),
            use_cuda_graph=use_captured_graph,
        )

    def _on_device(self, numbers: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        host = torch.tensor(numbers, dtype=dtype, pin_memory=self.runner.pin_memory)
        return host.to(self.runner.device, non_blocking=True)


def is_all_encoder_attn_metadata_set(attn_metadata: Any) -> bool:
    """Returns whether a step's metadata has the fields of encoder attention."""
    needed = ("encoder_seq_lens", "encoder_seq_lens_tensor", "max_encoder_seq_len")
    # Lengths are one tensor here; older metadata has them as a list, too.
    return all(getattr(attn_metadata, name, True) is not None for name in needed)


def is_all_cross_attn_metadata_set(attn_metadata: Any) -> bool:
    """Returns whether a step's metadata has the fields of cross attention, which include those of an encoder."""
    return (
        is_all_encoder_attn_metadata_set(attn_metadata)
        and attn_metadata.cross_slot_mapping is not None
        and attn_metadata.cross_block_tables is not None
    )


def get_seq_len_block_table_args(
    attn_metadata: Any, is_prompt: bool, attn_type: AttentionType | str
) -> tuple[Tensor, int, Tensor | None]:
    """Returns the key lengths, their bound and the block tables that a kind of attention reads.

    Decoders read their own, and the bound is that of the prompts or of the decodes; cross attention the encoder's
    lengths and the cross tables; encoders have no tables.

    `attn_metadata` are `PagedAttentionMetadata`, or older metadata with vLLM's names.

    Raises:
        InvalidInput: the metadata lacks the encoder's fields, or the kind is unknown.
    """
    kind = AttentionType(attn_type)
    if kind in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        bound = attn_metadata.max_prefill_seq_len if is_prompt else attn_metadata.max_decode_seq_len
        tables = _either(attn_metadata, "block_tables", "block_table") if kind is AttentionType.DECODER else None
        return _either(attn_metadata, "seq_lens_tensor", "seq_lens"), bound, tables
    is_cross = kind is AttentionType.ENCODER_DECODER
    needed = is_all_cross_attn_metadata_set if is_cross else is_all_encoder_attn_metadata_set
    if not needed(attn_metadata):
        raise InvalidInput("attn_metadata", "has no encoder fields", f"{kind.value} attention needs them")
    lens = _either(attn_metadata, "encoder_seq_lens_tensor", "encoder_seq_lens")
    return lens, attn_metadata.max_encoder_seq_len, attn_metadata.cross_block_tables if is_cross else None


def get_num_prefill_decode_query_kv_tokens(attn_metadata: Any, attn_type: AttentionType | str) -> tuple[int, int, int]:
    """Returns the query tokens of prefills, their key tokens, and the query tokens of decodes.

    Encoders have prefills only, of their own tokens; cross attention has the encoder's tokens as keys.

    Raises:
        InvalidInput: the metadata does not count encoder tokens and the kind needs it, or the kind is unknown.
    """
    kind = AttentionType(attn_type)
    if kind in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        prefill = attn_metadata.num_prefill_tokens
        return prefill, prefill, attn_metadata.num_decode_tokens
    encoder = attn_metadata.num_encoder_tokens
    if encoder is None:
        raise InvalidInput("num_encoder_tokens", "of the metadata is None", f"{kind.value} attention needs it")
    if kind is AttentionType.ENCODER:
        return encoder, encoder, 0
    return attn_metadata.num_prefill_tokens, encoder, attn_metadata.num_decode_tokens


def _either(attn_metadata: Any, older: str, name: str) -> Any:
    return getattr(attn_metadata, older) if hasattr(attn_metadata, older) else getattr(attn_metadata, name)
