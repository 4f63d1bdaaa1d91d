"""CUDA graphs of whole steps: static inputs for each batch size, captured once and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torch_core.base.errors import InvalidInput
from torch_core.metadata import CommonAttentionMetadata, PackedLayout, build_common_metadata
from torch_core.vllm.buffers import ENCODER_FIELDS, StepBuffers
from torch_core.vllm.builder import AttentionMetadataBuilder


class CommonAttentionState:
    """The static metadata of each batch size that was captured, and how a step is brought into it.

    The verbs are those of vLLM's older `CommonAttentionState` (`vllm/attention/backends/utils.py`). There the inputs
    of a graph are copied one by one into their buffers; here one upload fills them all. A capture outside of
    `graph_capture`, and a batch size that was not captured, raise InvalidInput.

    Args:
        builder: makes the metadata from the static tensors.
        layout_for: function from a number of sequences to the step's layout; cross attention adds the fields of
            `encoder_layout`.
        device: device of the tensors.

    Example:
        >>> from torch_core.vllm import BuilderConfig, TorchAttentionMetadataBuilder
        >>> from torch_core.metadata import metadata_layout
        >>> from torch_core.base.specs import KVCacheSpec
        >>> spec = KVCacheSpec(num_kv_heads=2, head_size=8, block_size=4, dtype="float32")
        >>> builder = TorchAttentionMetadataBuilder(spec, ["layer"], BuilderConfig(num_heads=2), "cpu")
        >>> layout_for = lambda size: metadata_layout(num_seqs=size, num_tokens=size, max_blocks=8)
        >>> state = CommonAttentionState(builder, layout_for, "cpu")
        >>> with state.graph_capture(max_batch_size=4):
        ...     metadata = state.graph_capture_get_metadata_for_batch(4)
        >>> metadata.block_table.shape
        torch.Size([4, 8])
    """

    def __init__(
        self, builder: AttentionMetadataBuilder, layout_for: Callable[[int], PackedLayout], device: torch.device | str
    ) -> None:
        self._builder = builder
        self._layout_for = layout_for
        self._device = device
        self._max_batch_size: int | None = None
        self._buffers: dict[int, StepBuffers] = {}

    @contextmanager
    def graph_capture(self, max_batch_size: int) -> Iterator[None]:
        """Makes room for static metadata of up to `max_batch_size` sequences; sizes are captured within it."""
        self._max_batch_size = max_batch_size
        try:
            yield
        finally:
            self._max_batch_size = None

    def graph_clone(self, batch_size: int) -> CommonAttentionState:
        """Returns a state with nothing captured, for another set of graphs of the same layers."""
        self._check_capturing(batch_size)
        return CommonAttentionState(self._builder, self._layout_for, self._device)

    def graph_capture_get_metadata_for_batch(self, batch_size: int, is_encoder_decoder_model: bool = False) -> Any:
        """Returns metadata over static tensors for a batch size; its sequences are empty until a step is prepared.

        Raises:
            InvalidInput: the size is too large, or the layout lacks the encoder's fields.
        """
        self._check_capturing(batch_size)
        layout = self._layout_for(batch_size)
        if is_encoder_decoder_model and any(name not in layout for name in ENCODER_FIELDS):
            raise InvalidInput("layout", "has no encoder fields", "add those of encoder_layout for cross attention")
        if batch_size not in self._buffers:
            self._buffers[batch_size] = StepBuffers(layout, self._device)
        buffers = self._buffers[batch_size]
        config = self._builder.vllm_config
        block_size = self._builder.kv_cache_spec.block_size * config.context_parallel.total_cp_world_size
        empty = build_common_metadata(
            [],
            block_size=block_size,
            num_blocks=2,
            num_seqs=layout["seq_lens"].size,
            num_tokens=layout["slot_mapping"].size,
            max_blocks=layout["block_tables"].shape[1],
            max_query_len=-(-layout["slot_mapping"].size // max(layout["seq_lens"].size, 1)),
            max_seq_len=layout["block_tables"].shape[1] * block_size,
            cache_group=config.cache_group or None,
            encoder_rows=[] if is_encoder_decoder_model else None,
            layout=layout,
        )
        return self._builder.build_for_cudagraph_capture(empty, arrays=buffers.arrays)

    def get_graph_input_buffers(self, batch_size: int, is_encoder_decoder_model: bool = False) -> dict[str, Tensor]:
        """Returns the static tensors that a graph of this batch size reads, by name."""
        names = ["slot_mapping", "seq_lens", "query_start_loc", "block_tables"]
        names += ENCODER_FIELDS if is_encoder_decoder_model else []
        arrays = self._captured(batch_size).arrays
        return {name: arrays[name] for name in names}

    def host_buffer(self, batch_size: int, step: int) -> Any:
        """Returns the host buffer into which the metadata of `step` is built; see `StepBuffers.host_buffer`."""
        return self._captured(batch_size).host_buffer(step)

    def prepare_graph_input_buffers(self, batch_size: int, step: int, metadata: CommonAttentionMetadata) -> None:
        """Uploads a step, built into the host buffer taken for it, into the static tensors of a batch size: one copy.

        For ranks that share sequences it also derives the rank's lengths and slots, in the memory that the captured
        step reads.

        Raises:
            InvalidInput: the metadata was built for another layout.
        """
        buffers = self._captured(batch_size)
        if metadata.layout != buffers.layout:
            problem = f"is padded to {metadata.num_seqs} sequences and {metadata.num_tokens} tokens"
            wanted = f"the graph of batch size {batch_size} has another layout. Build it with that layout"
            raise InvalidInput("metadata", problem, wanted)
        arrays = buffers.upload(step)
        if self._builder.vllm_config.context_parallel.total_cp_world_size > 1:
            self._builder.build(0, metadata, arrays=arrays)

    def _check_capturing(self, batch_size: int) -> None:
        if self._max_batch_size is None:
            raise InvalidInput("Nothing is being captured; do this inside `with state.graph_capture(max_batch_size)`.")
        if not 1 <= batch_size <= self._max_batch_size:
            wanted = f"this capture is for 1 to {self._max_batch_size} sequences"
            raise InvalidInput("batch_size", f"is {batch_size}", wanted)

    def _captured(self, batch_size: int) -> StepBuffers:
        if batch_size not in self._buffers:
            sizes = ", ".join(map(str, sorted(self._buffers))) or "none"
            raise InvalidInput("batch_size", value=batch_size, wanted=f"captured are: {sizes}. Pad to one of them")
        return self._buffers[batch_size]


class StepGraphs:
    """Runs a step function by CUDA graph, one graph for each key; on the CPU it calls the function.

    The function reads static tensors and returns tensors; on CUDA those are static too, and hold the latest replay's
    values. Its launches must not depend on values that it reads on the host.

    Args:
        device: device of the function's tensors.

    Example:
        >>> graphs = StepGraphs("cpu")
        >>> value = torch.zeros(1)
        >>> graphs.capture(1, lambda: value + 1)
        >>> _ = value.fill_(4)
        >>> graphs.replay(1)
        tensor([5.])
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._steps: dict[Any, Callable[[], Any]] = {}
        self._pool: Any = None

    @property
    def keys(self) -> tuple[Any, ...]:
        """The captured calls, in order."""
        return tuple(self._steps)

    def capture(self, key: Any, run: Callable[[], Any], *, warmups: int = 2) -> None:
        """Captures `run` under a new `key`, after ordinary calls that compile its kernels and settle allocations."""
        if key in self._steps:
            raise InvalidInput("key", value=key, wanted="a graph was captured for it: give each graph its own key")
        if self._device.type != "cuda":
            self._steps[key] = run
            return
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(warmups):
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = run()
        self._pool = self._pool or graph.pool()

        def replay() -> Any:
            graph.replay()
            return outputs

        self._steps[key] = replay

    def replay(self, key: Any) -> Any:
        """Runs the step of `key`, which was captured, on the current stream and returns its outputs."""
        step = self._steps.get(key)
        if step is None:
            raise InvalidInput("key", value=key, wanted=f"captured are: {', '.join(map(str, self._steps))}")
        return step()
