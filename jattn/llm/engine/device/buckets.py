"""The shapes of steps: padded sizes, the key of a compiled program, and groups of rows that share a prefix."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
from flax import nnx

from jattn.llm.engine.device.sampler import Rows, Sampler
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.options.params import SamplingKind
from jattn.llm.engine.scheduler import ScheduledRow, ScheduledStep
from jattn.llm.models.attention import Attention
from jattn.nn import PagedAttention
from torch_core.cache import LayerGroups
from torch_core.metadata import (
    Buckets,
    CommonAttentionMetadata,
    PackedLayout,
    encoder_layout,
    group_layout,
    metadata_layout,
    prefix_groups,
    prefix_piece_tokens,
)

#: A step's int32 arrays of each sequence, in addition to the metadata: `Rows`, and two that change.
PER_SEQUENCE = (
    ("sampling", (len(Rows._fields),)),
    ("sample_index", ()),
    ("slot", ()),
    ("adapter", ()),
    ("state_slots", ()),
)
# XLA's CPU backend sums a matrix product in one order for 2 to 32 rows and in another for one row and for 64 or more:
# prefill stays on one side, so that a prompt's bits do not depend on other prompts.
_SMALLEST_PREFILL = 64
_SMALLEST_QUERY = 16
# From this number of sequences on, and of tokens if a step costs by them, there are sizes between two powers of two.
_FIRST_BETWEEN = 256
_FEWEST_SEQUENCES = 2
# Groups are faster from a few sequences on; at most this number of pieces is considered.
_SEQUENCES_OF_A_PIECE = 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """The padded sizes of a step and its part of the sampler: the key of a compiled program.

    Attributes:
        num_seqs: sequences.
        num_tokens: new tokens; of decode steps one for each sequence and step.
        max_query_len: an upper bound on the new tokens of a sequence.
        sampler: the part of the sampler that the batch needs.
        num_steps: tokens decoded one after the other.
        num_guesses: tokens after the first one of a sequence that are verified at most.
        num_pieces: number of pieces, of groups that share a prefix, that the step has room for; 0 for none.
        piece_tokens: sequences of a piece at most; 0 for a step that attends each sequence on its own.
        num_encoder_blocks: blocks of an encoder's input at most; 0 without an encoder.
        encodes: the tokens are inputs of the encoder; nothing is sampled.
        adapters: sequences have low-rank adapters.
    """

    num_seqs: int
    num_tokens: int
    max_query_len: int
    sampler: Sampler
    num_steps: int = 1
    num_guesses: int = 0
    num_pieces: int = 0
    piece_tokens: int = 0
    num_encoder_blocks: int = 0
    encodes: bool = False
    adapters: bool = False

    @property
    def num_inputs(self) -> int:
        """Tokens that the model is given at once."""
        return self.num_tokens // self.num_steps

    @property
    def num_samples(self) -> int:
        """Tokens that a sequence is given at most."""
        return self.num_steps + self.num_guesses

    @property
    def decodes(self) -> bool:
        """Whether every sequence has one new token, and its guesses."""
        return self.max_query_len == 1 + self.num_guesses

    def covers(self, other: Bucket) -> bool:
        """Returns whether the program of this bucket can run every step of another one, as well as its own."""
        same = ("num_steps", "num_guesses", "decodes", "num_encoder_blocks", "encodes")
        return (
            # Which rows share a prefix is known only when the step's buffer is filled.
            (not self.piece_tokens or self == other)
            and all(getattr(self, name) == getattr(other, name) for name in same)
            and self.num_seqs >= other.num_seqs
            and self.num_tokens >= other.num_tokens
            and self.max_query_len >= other.max_query_len
            and self.sampler.kind >= other.sampler.kind
            and self.adapters >= other.adapters
        )

    def layout(self, max_blocks: int, num_groups: int, num_request_inputs: int) -> PackedLayout:
        """Returns where the arrays of a step lie in the one buffer that is uploaded."""
        sizes = (self.num_seqs, self.num_inputs, self.num_tokens, num_request_inputs)
        if self.encodes:
            return _layout(*sizes, self.num_encoder_blocks, 0, num_groups, 0)
        return _layout(*sizes, max_blocks, self.num_pieces, num_groups, self.num_encoder_blocks)

    def __str__(self) -> str:
        steps = f"{self.num_steps} steps, " if self.num_steps > 1 else ""
        steps += f"{self.num_guesses} guesses, " if self.num_guesses else ""
        steps += "shared prefixes, " if self.piece_tokens else ""
        steps += "adapters, " if self.adapters else ""
        kind = "encoder" if self.encodes else self.sampler.kind.label
        return f"{self.num_seqs} sequences, {self.num_inputs} tokens, queries up to {self.max_query_len}, {steps}{kind}"


@dataclass(frozen=True, slots=True)
class Cascade:
    """The choice for one model on one device.

    Attributes:
        piece_tokens: sequences that attend to a prefix as one.
        always: wherever blocks are shared; else if it should be faster.
        shape: inputs of that decision; see `torch_core.metadata.PrefixGroups.pays`.
    """

    piece_tokens: int
    always: bool
    shape: dict[str, Any]

    @classmethod
    def of(cls, model: nnx.Module, config: EngineConfig, groups: LayerGroups) -> Cascade | None:
        """Returns None if no step can profit.

        Prefixes are looked for in the tables of the first cache group, and attended once in its layers. Other layers
        attend as ever, so they may have windows.
        """
        layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, PagedAttention)]
        device, wanted = jax.devices()[0], config.enable_cascade_attention
        if wanted is None:
            wanted = device.platform == "gpu"
        hidden = (
            config.batch_invariant or config.fixed_shapes,
            not config.enable_prefix_caching,
            # A piece consists of sequences; it has as many queries only if each sequence has one.
            config.num_speculative_tokens > 0,
            # No sequence has a whole prefix.
            config.decode_context_parallel_size > 1,
            config.max_num_seqs < _FEWEST_SEQUENCES,
        )
        if len(groups.groups) > 1 and groups.groups[0].sliding_window is None:
            layers = [layer for layer in layers if layer.sliding_window is None]
        biased = any(isinstance(module, Attention) and module.sees_distances for _, module in nnx.iter_modules(model))
        if not wanted or not layers or any(hidden) or biased or any(layer.sees_distances for layer in layers):
            return None
        first = layers[0]
        heads = {"num_query_heads": first.num_heads, "num_kv_heads": first.num_kv_heads}
        return cls(
            piece_tokens=prefix_piece_tokens(1, **heads),
            always=config.enable_cascade_attention is True,
            # A multiprocessor count is not JAX's to tell on every version; that of an H200 then.
            shape={**heads, "head_size": first.head_dim, "num_sms": getattr(device, "core_count", 132)},
        )

    def num_pieces(self, num_seqs: int) -> int:
        """Returns the number of pieces that a step of this number of sequences has room for; 0 if it is too small."""
        return num_seqs // _SEQUENCES_OF_A_PIECE + 1 if num_seqs >= _FEWEST_SEQUENCES else 0

    def shared(
        self, bucket: Bucket, metadata: CommonAttentionMetadata, layout: PackedLayout, bytes_per_element: int
    ) -> Bucket:
        """Writes the groups of a step into its buffer, if it has any; returns the bucket that it then is."""
        groups = prefix_groups(metadata, piece_tokens=self.piece_tokens, max_pieces=bucket.num_pieces)
        if groups is None or not (self.always or groups.pays(**self.shape, bytes_per_element=bytes_per_element)):
            return bucket
        layout["prefix_lens"].of(metadata.packed)[: len(groups.prefix_lens)] = groups.prefix_lens
        starts = layout["piece_starts"].of(metadata.packed)
        starts[: len(groups.piece_starts)] = groups.piece_starts
        starts[len(groups.piece_starts) :] = groups.piece_starts[-1]
        return replace(bucket, piece_tokens=self.piece_tokens)


class StepBuckets:
    """The padded sizes that steps of an engine can have: which of them serves a step, and all of them for warm-up.

    Args:
        config: sizes of a step.
        cascade: steps that attend shared prefixes once; None for none.
        num_logprobs: tokens that a full step reports.
        max_blocks: columns of a block table.
        num_groups: cache groups of the model.
        longest_query: most new tokens of a row if a step costs by its longest row; None if it costs by its tokens.
        num_encoder_blocks: blocks of an encoder's input; 0 without an encoder.
        num_request_inputs: numbers that each request brings.

    Attributes:
        samplers: the sampler of each kind.
    """

    def __init__(
        self,
        config: EngineConfig,
        cascade: Cascade | None,
        *,
        num_logprobs: int,
        max_blocks: int,
        num_groups: int,
        longest_query: int | None,
        num_encoder_blocks: int,
        num_request_inputs: int = 0,
    ) -> None:
        self._config, self._cascade = config, cascade
        self._max_blocks, self._num_groups, self._num_encoder_blocks = max_blocks, num_groups, num_encoder_blocks
        self._num_guesses, self._num_request_inputs = config.num_speculative_tokens, num_request_inputs
        self._num_seqs, self._num_tokens = bucket_sizes(config, by_tokens=longest_query is None)
        self._query_lens = None
        if longest_query is not None and not config.fixed_shapes:
            largest = min(self._num_tokens.largest, longest_query)
            self._query_lens = Buckets.powers_of_two("new tokens of a row", largest, smallest=_SMALLEST_QUERY)
        # On a CPU a plain program tests whether any row samples, and to compile more programs costs more than to run
        # the whole sampler. Elsewhere the noise for a large vocabulary is most of a decode step's work outside its
        # layers.
        on_cpu = jax.default_backend() == "cpu"
        mode, processors = config.logprobs_mode, config.logits_processors or {}
        shared: dict[str, Any] = {"logprobs_mode": mode, "batch_invariant": config.batch_invariant}
        masks = config.enable_return_sampling_mask
        full = Sampler(SamplingKind.FULL, num_logprobs, tuple(processors.values()), records_masks=masks, **shared)
        self.samplers = {
            SamplingKind.GREEDY: Sampler(SamplingKind.PLAIN if on_cpu else SamplingKind.GREEDY),
            SamplingKind.PLAIN: Sampler(SamplingKind.PLAIN),
            SamplingKind.SCORED: full if on_cpu else Sampler(SamplingKind.SCORED, **shared),
            SamplingKind.FULL: full,
        }
        self._decoding: dict[tuple[int, SamplingKind, int, bool], tuple[Bucket, PackedLayout]] = {}

    @property
    def prompt_sizes(self) -> tuple[int, ...]:
        """Padded numbers of tokens of steps with prompts, in order."""
        return self._num_tokens.sizes

    def layout(self, bucket: Bucket) -> PackedLayout:
        """Returns the places of a step's arrays in the buffer that is uploaded."""
        return bucket.layout(self._max_blocks, self._num_groups, self._num_request_inputs)

    def of(self, step: ScheduledStep) -> tuple[Bucket, PackedLayout]:
        """Returns the smallest bucket that serves a step, and its layout."""
        kind, decodes, longest = _facts(step.rows)
        if (decodes and not step.encodes) or step.num_decode_steps > 1:
            key = len(step.rows), kind, step.num_decode_steps, _have_adapters(step.rows)
            if key not in self._decoding:
                bucket = self.decode(self._num_seqs.pad(len(step.rows)), self.samplers[kind], step.num_decode_steps)
                bucket = replace(bucket, adapters=key[-1])
                self._decoding[key] = bucket, self.layout(bucket)
            return self._decoding[key]
        bucket = self._of_prompts(step.rows, kind, longest)
        return bucket, self.layout(bucket)

    def of_prompts(self, rows: Sequence[ScheduledRow]) -> Bucket:
        """Returns the smallest bucket that serves a step with prompts, or inputs of the encoder, in its rows."""
        kind, _, longest = _facts(rows)
        return self._of_prompts(rows, kind, longest)

    def _of_prompts(self, rows: Sequence[ScheduledRow], kind: SamplingKind, longest: int) -> Bucket:
        num_tokens = self._num_tokens.pad(sum(row.num_new_tokens for row in rows))
        encodes = rows[-1].start < 0
        sampler = self.samplers[SamplingKind.PLAIN if encodes else kind]
        bucket = self._prefill(len(rows), num_tokens, longest, sampler)
        return replace(bucket, encodes=encodes, adapters=_have_adapters(rows))

    def decode(self, num_seqs: int, sampler: Sampler, num_steps: int) -> Bucket:
        """Returns the bucket of steps that decode `num_steps` tokens of each of `num_seqs` sequences."""
        pieces = 0 if self._cascade is None else self._cascade.num_pieces(num_seqs)
        guesses = self._num_guesses
        sizes = (num_seqs, num_seqs * (num_steps + guesses), 1 + guesses)
        return Bucket(*sizes, sampler, num_steps, guesses, pieces, num_encoder_blocks=self._num_encoder_blocks)

    def all(self) -> Iterator[Bucket]:
        """Yields every bucket that a step can have."""
        for bucket in self._without_adapters():
            yield bucket
            if self._config.enable_lora:
                yield replace(bucket, adapters=True)

    def _without_adapters(self) -> Iterator[Bucket]:
        for sampler in dict.fromkeys(self.samplers.values()):
            for bucket in self._prompts(sampler):
                yield bucket
                if self._num_encoder_blocks and sampler.kind is SamplingKind.PLAIN:
                    yield replace(bucket, encodes=True)
            for num_steps in sorted({1, self._config.most_scheduler_steps}):
                for num_seqs in self._num_seqs.sizes:
                    bucket = self.decode(num_seqs, sampler, num_steps)
                    yield bucket
                    if bucket.num_pieces and self._cascade is not None:
                        yield replace(bucket, piece_tokens=self._cascade.piece_tokens)

    def largest(self) -> Iterator[Bucket]:
        """Yields the buckets of the largest steps, with the whole sampler."""
        full = self.samplers[SamplingKind.FULL]
        prompts = max(self._prompts(full), key=lambda each: each.num_tokens * each.num_seqs)
        yield replace(prompts, adapters=self._config.enable_lora)
        if self._num_guesses:
            # Each guess has logits.
            yield self.decode(self._num_seqs.largest, full, 1)

    def _prefill(self, num_seqs: int, num_tokens: int, longest: int, sampler: Sampler) -> Bucket:
        most = self._config.max_num_seqs
        blocks = self._num_encoder_blocks
        if self._query_lens is None:
            # A padded row and a longer bound cost little in a prefill step, a program more costs seconds.
            return Bucket(min(most, num_tokens), num_tokens, num_tokens, sampler, num_encoder_blocks=blocks)
        if num_seqs == 1:
            return Bucket(1, num_tokens, num_tokens, sampler, num_encoder_blocks=blocks)
        return next(
            bucket
            for bucket in self._padded(self._query_lens.pad(longest), sampler)
            if bucket.num_tokens >= num_tokens and bucket.num_seqs >= num_seqs
        )

    def _padded(self, longest: int, sampler: Sampler) -> Iterator[Bucket]:
        """Yields buckets of prompts padded to `longest` tokens: no step attends to more than twice its tokens."""
        most, smallest = self._config.max_num_seqs, cast(Buckets, self._query_lens).sizes[0]
        for num_tokens in self._num_tokens.sizes:
            if num_tokens >= longest:
                # The largest step takes any number of the shortest prompts; the scheduler sees to the longer ones.
                takes_all = longest == smallest and num_tokens == self._num_tokens.largest
                num_seqs = most if takes_all else min(most, 2 * num_tokens // longest)
                yield Bucket(num_seqs, num_tokens, longest, sampler, num_encoder_blocks=self._num_encoder_blocks)
                if num_seqs * longest <= num_tokens:
                    # This number of rows cannot have more.
                    return

    def _prompts(self, sampler: Sampler) -> Iterator[Bucket]:
        for num_tokens in self._num_tokens.sizes:
            yield self._prefill(1, num_tokens, num_tokens, sampler)
            if self._query_lens is not None and num_tokens >= self._query_lens.largest:
                # One row has no more.
                break
        if self._query_lens is not None and self._config.max_num_seqs > 1:
            for longest in self._query_lens.sizes:
                yield from self._padded(longest, sampler)


def _facts(rows: Sequence[ScheduledRow]) -> tuple[SamplingKind, bool, int]:
    """Returns the sampler that rows need, whether each has one new token and its guesses, and the most new tokens."""
    kind, decodes, longest = SamplingKind.GREEDY, True, 0
    for request, _, num_new_tokens, num_samples, guesses in rows:
        # A chunk that does not reach its prompt's end samples nothing: the smallest part of the sampler is enough.
        if request.sampling_kind > kind and (num_samples or request.params.prompt_logprobs is not None):
            kind = request.sampling_kind
        if num_new_tokens != 1 + len(guesses):
            decodes = False
        if num_new_tokens > longest:
            longest = num_new_tokens
    return kind, decodes, longest


def _have_adapters(rows: Sequence[ScheduledRow]) -> bool:
    return any(row.request.adapter is not None for row in rows)


def bucket_sizes(config: EngineConfig, *, by_tokens: bool) -> tuple[Buckets, Buckets]:
    """Returns the sizes of a decode step's sequences and of a prefill step's tokens, by which it may cost."""
    most_seqs, most_tokens = config.max_num_seqs, max(config.max_num_batched_tokens, _SMALLEST_PREFILL)
    names = ("sequences of a step", "new tokens of a step")
    if config.fixed_shapes:
        return Buckets(names[0], (most_seqs,)), Buckets(names[1], (most_tokens,))
    # A few sequences cost as much as one, because the weights are read once. Many cost in proportion to their number.
    few = tuple(size for size in (1, 4, 16) if size < most_seqs)
    seqs = Buckets.powers_of_two(names[0], most_seqs, smallest=32).sizes
    tokens = Buckets.powers_of_two(names[1], most_tokens, smallest=_SMALLEST_PREFILL).sizes
    return Buckets(names[0], few + _denser(seqs)), Buckets(names[1], _denser(tokens) if by_tokens else tokens)


def _denser(sizes: tuple[int, ...]) -> tuple[int, ...]:
    between = (size * 3 // 2 for size in sizes if size >= _FIRST_BETWEEN)
    return tuple(sorted({*sizes, *(size for size in between if size < sizes[-1])}))


@functools.lru_cache(maxsize=256)
def _layout(
    num_seqs: int,
    num_inputs: int,
    num_tokens: int,
    num_request_inputs: int,
    max_blocks: int,
    num_pieces: int,
    num_groups: int,
    num_encoder_blocks: int,
) -> PackedLayout:
    sizes = {"num_seqs": num_seqs, "num_tokens": num_tokens, "max_blocks": max_blocks}
    extra = [("token_ids", (num_inputs,)), *((name, (num_seqs, *rest)) for name, rest in PER_SEQUENCE)]
    if num_request_inputs:
        extra.append(("inputs", (num_seqs, num_request_inputs)))
    if num_pieces:
        extra += [("prefix_lens", (num_seqs,)), ("piece_starts", (num_pieces + 1,))]
    if num_encoder_blocks:
        extra += encoder_layout(num_seqs=num_seqs, num_encoder_tokens=0, max_encoder_blocks=num_encoder_blocks)
    return metadata_layout(**sizes, extra=[*extra, *group_layout(num_groups, **sizes)])
