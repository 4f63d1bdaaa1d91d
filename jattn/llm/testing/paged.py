"""jattn's side of the cross-check: logits of every position, and greedy tokens, through the paged cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.llm.engine import LLM, EngineConfig, SamplingParams
from jattn.llm.models import Decoder, EncoderDecoder
from jattn.llm.models.encoder_decoder import build_model
from jattn.metadata import AttentionMetadata
from jattn.pool import KVPool
from torch_core.metadata import Buckets, EncoderRow, SequenceRow, build_common_metadata

_BLOCK_SIZE = 16
_MAX_NEW_TOKENS = 512


def with_implementation(model: Decoder, implementation: str) -> Decoder:
    """Returns a decoder over the same parameters whose attention runs with `implementation`."""
    abstract = nnx.eval_shape(lambda: build_model(model.config, rngs=nnx.Rngs(0), implementation=implementation))
    return nnx.merge(nnx.graphdef(abstract), nnx.state(model))


def encoder_states(model: EncoderDecoder, inputs: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Returns the hidden states of an encoder for each input: float32[states, tokens, hidden_size]."""
    split = nnx.split(model)
    return [np.asarray(_encoder_states(*split, np.asarray([each], np.int32))) for each in inputs]


def engine_tokens(model: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
    """Returns the greedy tokens that `jattn.llm.engine.LLM` generates for all prompts at once, past any end of text."""
    # An encoder reads the prompt, and the decoder starts with one token.
    longest = (max(map(len, prompts)) if model.config.encoder is None else 1) + max_tokens
    llm = LLM(model, config=EngineConfig(max_model_len=longest))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate([list(prompt) for prompt in prompts], params)]


class PagedRun:
    """Computes the logits of sequences through a paged cache; sizes are padded as the engine pads them.

    The sequences share one batch, and the blocks of each are scattered over the pool. A model with an encoder has one
    of `encoder_inputs` for each sequence.
    """

    def __init__(
        self, model: Decoder, sequences: Sequence[Sequence[int]], encoder_inputs: Sequence[Sequence[int]] = ()
    ) -> None:
        self._sequences = [np.asarray(sequence, np.int32) for sequence in sequences]
        self._inputs = [np.asarray(each, np.int32) for each in encoder_inputs]
        widths = [-(-len(tokens) // _BLOCK_SIZE) for tokens in (*self._sequences, *self._inputs)]
        order = 1 + np.random.default_rng(0).permutation(sum(widths)).astype(np.int32)
        tables = [table.tolist() for table in np.split(order, np.cumsum(widths)[:-1])]
        self._tables, cross = tables[: len(sequences)], tables[len(sequences) :]
        self._cross = [EncoderRow(table, len(each)) for table, each in zip(cross, self._inputs, strict=True)]
        self._max_blocks = max(widths)
        self._num_seqs = Buckets.powers_of_two("sequences of a step", 1 << (len(sequences) - 1).bit_length())
        self._num_tokens = Buckets.powers_of_two("new tokens of a step", _MAX_NEW_TOKENS, smallest=_BLOCK_SIZE)
        paged = model.paged_spec
        first, *further = [*paged.cache_specs(_BLOCK_SIZE), *paged.further_specs(_BLOCK_SIZE)]
        self._pool = KVPool(
            first,
            num_layers=1,
            num_blocks=1 + sum(widths),
            further=further,
            states=paged.states,
            num_slots=1 + len(sequences) if paged.states else 0,
        )
        graph, self._state = nnx.split(model)
        self._step = functools.partial(_step, graph=graph)

    def hidden_states(self, prefill_lens: Sequence[int] | None = None) -> list[np.ndarray]:
        """Returns the states of `Decoder.hidden_states`, float32[states, tokens, hidden_size] of each sequence.

        `prefill_lens` are as in `logits`; None for whole sequences.
        """
        lengths = [len(sequence) for sequence in self._sequences] if prefill_lens is None else prefill_lens
        return [each.swapaxes(0, 1) for each in self._run(functools.partial(self._step, part="layers"), lengths)]

    def logits(self, prefill_lens: Sequence[int]) -> list[np.ndarray]:
        """Returns the logits after each token of every sequence, float32[tokens, vocab_size] each.

        The first `prefill_lens[i]` tokens of sequence `i`, at least one, are prefilled (in chunks beyond 512 tokens a
        step, as the engine does), the others decoded one by one. The whole pool holds NaN before, so a read of an
        unwritten slot shows.
        """
        return self._run(functools.partial(self._step, part="logits"), prefill_lens)

    def _run(self, step: Callable[..., Any], prefill_lens: Sequence[int]) -> list[np.ndarray]:
        self._pool.run(_fill_with_nan)
        for row, token_ids in zip(self._cross, self._inputs, strict=True):
            self._encode(row, token_ids)
        lengths = [len(sequence) for sequence in self._sequences]
        done = [0] * len(lengths)
        pieces: list[list[np.ndarray]] = [[] for _ in lengths]
        while done != lengths:
            counts = _next_counts(done, prefill_lens, lengths)
            for index, piece in self._run_step(step, done, counts):
                pieces[index].append(piece)
            done = [start + count for start, count in zip(done, counts, strict=True)]
        return [np.concatenate(each) for each in pieces]

    def _encode(self, row: EncoderRow, token_ids: np.ndarray) -> None:
        """Runs the encoder over one input; it writes keys and values of cross attention to the blocks of `row`."""
        num_tokens = max(_BLOCK_SIZE, 1 << (len(token_ids) - 1).bit_length())
        rows = [SequenceRow(row.block_ids, 0, len(token_ids))]
        sizes = {"num_seqs": 1, "num_tokens": num_tokens, "max_query_len": num_tokens}
        self._run_rows(functools.partial(self._step, part="encoder"), rows, [token_ids], **sizes)

    def _run_rows(
        self, step: Callable[..., Any], rows: list[SequenceRow], pieces: list[np.ndarray], **sizes: Any
    ) -> Any:
        common = build_common_metadata(
            rows,
            block_size=_BLOCK_SIZE,
            num_blocks=self._pool.num_blocks,
            max_blocks=self._max_blocks,
            num_slots=self._pool.num_slots or None,
            **sizes,
        )
        token_ids = np.zeros(sizes["num_tokens"], np.int32)
        token_ids[: sum(map(len, pieces))] = np.concatenate(pieces)
        metadata = AttentionMetadata.from_common(common)
        return self._pool.run(step, self._state, token_ids, common.positions, metadata)

    def _run_step(
        self, step: Callable[..., Any], starts: Sequence[int], counts: Sequence[int]
    ) -> Iterator[tuple[int, np.ndarray]]:
        active = [index for index, count in enumerate(counts) if count]
        has_states = self._pool.num_slots > 0
        rows = [
            SequenceRow(self._tables[index], starts[index], counts[index], state_slot=has_states * (1 + index))
            for index in active
        ]
        longest, total = max(counts), sum(counts)
        num_seqs = self._num_seqs.pad(len(rows))
        num_tokens = num_seqs if longest == 1 else self._num_tokens.pad(total)
        pieces = [self._sequences[index][starts[index] : starts[index] + counts[index]] for index in active]
        result = self._run_rows(
            step,
            rows,
            pieces,
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            max_query_len=1 if longest == 1 else num_tokens,
            encoder_rows=[self._cross[index] for index in active] if self._cross else None,
        )
        with self._pool.guard():
            logits = np.asarray(result)
        ends = np.cumsum([counts[index] for index in active])
        yield from zip(active, np.split(logits[:total], ends[:-1]), strict=True)


def _next_counts(done: Sequence[int], prefill_lens: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Returns the new tokens of each sequence in the next step: prefill while there is any, then decode."""
    counts, budget = [], _MAX_NEW_TOKENS
    for start, stop in zip(done, prefill_lens, strict=True):
        counts.append(max(min(stop - start, budget), 0))
        budget -= counts[-1]
    if any(counts):
        return counts
    return [int(start < length) for start, length in zip(done, lengths, strict=True)]


# Jitted here and not for each run: models of one config and prompts of the same sizes share the programs.
@functools.partial(jax.jit, donate_argnums=0, static_argnames=("graph", "part"))
def _step(
    kv_caches: tuple[jax.Array, ...],
    state: nnx.State,
    token_ids: jax.Array,
    positions: jax.Array,
    metadata: AttentionMetadata,
    *,
    graph: nnx.GraphDef,
    part: Literal["logits", "layers", "encoder"],
) -> tuple[jax.Array | None, tuple[jax.Array, ...]]:
    """Returns the logits, the hidden states after every layer, or nothing of an encoder; and the caches."""
    model = nnx.merge(graph, state)
    if part == "encoder":
        return None, model.encode(token_ids, positions, kv_caches, metadata)
    if part == "layers":
        hidden, caches = zip(*model.paged_hidden_states(token_ids, positions, kv_caches, metadata), strict=True)
        return jnp.stack(hidden, axis=1).astype(jnp.float32), caches[-1]
    hidden, kv_caches = model(token_ids, positions, kv_caches, metadata)
    return model.logits(hidden), kv_caches


@functools.partial(jax.jit, static_argnums=0)
def _encoder_states(graph: nnx.GraphDef, state: nnx.State, token_ids: jax.Array) -> jax.Array:
    model = nnx.merge(graph, state)
    return jnp.concatenate(list(model.encoder.hidden_states(model.embed_tokens(token_ids)))).astype(jnp.float32)


@functools.partial(jax.jit, donate_argnums=0)
def _fill_with_nan(kv_caches: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, ...]]:
    # A product and not a constant: an argument that is never read would not be donated.
    return None, tuple(cache * jnp.nan for cache in kv_caches)
