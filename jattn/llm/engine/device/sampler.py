"""Choosing the next token on the device, each row by its own parameters and its own random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.llm.engine.device.tables import SamplerState, SlotTables
from jattn.llm.engine.options.params import PACKED_FLOATS, SamplingKind
from jattn.llm.engine.request.outputs import Logprobs
from jattn.ops import row_logsumexp
from jattn.parallel import exchange
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput

#: `f(logits float32[vocab], token_ids int32[max_model_len], num_prompt_tokens, num_tokens, value) -> float32[vocab]`:
#: pure, of one row; entries of `token_ids` after `num_tokens` are undefined.
LogitsProcessor = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


_GROUP = 128


class Rows(NamedTuple):
    """The rows' parameters, packed by `pack_sampling` as int32[rows, len(fields)]; names are vLLM's."""

    temperature: Any
    top_p: Any
    min_p: Any
    repetition_penalty: Any
    presence_penalty: Any
    frequency_penalty: Any
    top_k: Any
    seed: Any
    num_prompt_tokens: Any

    @classmethod
    def unpack(cls, packed: jax.Array) -> Rows:
        """Returns the columns of int32[rows, len(fields)], each with its own type."""
        floats = jax.lax.bitcast_convert_type(packed[:, :_NUM_FLOATS], jnp.float32)
        seed = jax.lax.bitcast_convert_type(packed[:, _NUM_FLOATS + 1], jnp.uint32)
        return cls._make([*floats.T, packed[:, _NUM_FLOATS], seed, packed[:, _NUM_FLOATS + 2]])


_NUM_FLOATS = len(PACKED_FLOATS)


@dataclass(frozen=True, slots=True)
class VocabShards:
    """Logits of which each device of a mesh axis has a part, the last one perhaps with -inf after the vocabulary.

    Attributes:
        axis: the mesh axis.
        vocab_size: vocabulary size of all devices together.
        count: logits of one device.
        peers: as in `jattn.parallel.all_reduce`.
    """

    axis: str
    vocab_size: int
    count: int
    peers: jax.Array | None = None

    def gathered(self, logits: jax.Array) -> jax.Array:
        """Returns all logits [..., vocab_size], on every device."""
        return jax.lax.all_gather(logits, self.axis, axis=-1, tiled=True)[..., : self.vocab_size]

    def own(self, x: jax.Array) -> jax.Array:
        """Returns this device's part of an array [rows, vocab_size]."""
        padding = self.count * jax.lax.axis_size(self.axis) - self.vocab_size
        first = jax.lax.axis_index(self.axis) * self.count
        return jax.lax.dynamic_slice_in_dim(jnp.pad(x, ((0, 0), (0, padding))), first, self.count, 1)

    def argmax(self, x: jax.Array) -> jax.Array:
        """Returns int32[rows], the first of the largest; two numbers a row and device are gathered."""
        best = _likeliest(x)
        value = jnp.take_along_axis(x, best[:, None], axis=1)[:, 0]
        token = best + jax.lax.axis_index(self.axis) * self.count
        message = jnp.stack([jax.lax.bitcast_convert_type(value, jnp.int32), token])
        values, tokens = jnp.moveaxis(exchange(message[None], self.axis, self.peers), 1, 0)
        first = jnp.argmax(jax.lax.bitcast_convert_type(values, jnp.float32), axis=0)
        return jnp.take_along_axis(tokens, first[None], axis=0)[0]


@dataclass(frozen=True, slots=True)
class Sampler:
    """The sampling of a step; static.

    Attributes:
        kind: the smallest kind that the batch needs.
        num_logprobs: number of the likeliest tokens that a full step reports.
        processors: processors of the engine, in order.
        logprobs_mode: see `EngineConfig.logprobs_mode`.
        records_masks: report the tokens that could be sampled.
        batch_invariant: sum the exponentials of a row in one order; see `token_logprobs`.
    """

    kind: SamplingKind
    num_logprobs: int = 0
    processors: tuple[LogitsProcessor, ...] = ()
    logprobs_mode: str = "raw_logprobs"
    records_masks: bool = False
    batch_invariant: bool = False

    def __call__(
        self,
        logits: jax.Array,
        rows: Rows,
        state: SamplerState,
        *,
        sample_index: jax.Array,
        num_tokens: jax.Array,
        slots: jax.Array,
        shards: VocabShards | None = None,
    ) -> tuple[jax.Array, Logprobs | None, SamplerState]:
        """Returns int32[rows] tokens, their log-probabilities if the kind has any, and the next state."""
        if self.kind is SamplingKind.GREEDY:
            return _largest_of(logits, shards), None, state
        if self.kind is SamplingKind.SCORED:
            tokens = sample(logits, rows, sample_index, shards)
            return tokens, self._scored(logits, logits, rows, tokens, shards), state
        if self.kind is SamplingKind.PLAIN or state.tables is None:
            return sample(logits, rows, sample_index, shards), None, state
        if shards is not None:
            # The thresholds of filters are found in 62 sums over a row, one after the other, and users' processors
            # want whole rows: as many messages would take longer than the one of all logits.
            logits = shards.gathered(logits)
        tokens, changed = sample_fully(
            logits,
            rows,
            sample_index,
            num_tokens=num_tokens,
            slots=slots,
            tables=state.tables,
            masks=state.masks,
            processors=self.processors,
        )
        logprobs = self._scored(logits, changed, rows, tokens)
        if self.records_masks:
            logprobs = logprobs._replace(kept=_words(changed > -jnp.inf))
        # The neutral slot's tokens mean nothing: rows that do not sample and padding may write there.
        token_ids = state.tables.token_ids.at[slots, num_tokens].set(tokens, mode="drop")
        return tokens, logprobs, SamplerState(SlotTables(token_ids, *state.tables[1:]), state.masks)

    def _scored(
        self, raw: jax.Array, changed: jax.Array, rows: Rows, tokens: jax.Array, shards: VocabShards | None = None
    ) -> Logprobs:
        """Returns the values that the mode reports.

        Args:
            raw: the model's logits.
            changed: those after all options but the temperature.
            rows, tokens, shards: as in `token_logprobs`.
        """
        values = raw
        if self.logprobs_mode.startswith("processed"):
            values = changed / jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None]
        normalize = self.logprobs_mode.endswith("logprobs")
        options = {"normalize": normalize, "batch_invariant": self.batch_invariant}
        return token_logprobs(values, tokens, self.num_logprobs, shards, **options)


def check_processors(processors: Mapping[str, LogitsProcessor], *, vocab_size: int, max_model_len: int) -> None:
    """Traces an engine's processors as a step does, so that none fails in the midst of other requests'.

    Raises:
        InvalidInput: one raises, or returns no float32[vocab].
    """
    shapes = (vocab_size,), (max_model_len,), (), (), ()
    dtypes = jnp.float32, jnp.int32, jnp.int32, jnp.int32, jnp.float32
    rows = [jax.ShapeDtypeStruct((1, *shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    for name, processor in processors.items():
        try:
            found = jax.eval_shape(jax.vmap(processor), *rows)
        except Exception as error:
            raise InvalidInput(
                f"logits_processors[{shown(name)}] raises {type(error).__name__} where it is traced: {error}. It is "
                f"called with logits float32[{vocab_size}], token_ids int32[{max_model_len}], num_prompt_tokens, "
                "num_tokens and value."
            ) from error
        if getattr(found, "shape", None) != (1, vocab_size) or found.dtype.kind == "c":
            what = f"{found.dtype}{list(found.shape[1:])}" if isinstance(found, jax.ShapeDtypeStruct) else found
            raise InvalidInput(f"logits_processors[{shown(name)}] returns {what}; it must be float32[{vocab_size}].")


def sample(logits: jax.Array, rows: Rows, sample_index: jax.Array, shards: VocabShards | None = None) -> jax.Array:
    """Returns one token for each row of a plain batch: the likeliest, or drawn at the row's temperature.

    A row's token depends on its own logits, parameters, seed and index only, never on its batch mates: the random key
    is `fold_in(key(seed), sample_index)`.

    Args:
        logits: float32[rows, vocab].
        rows: the rows' parameters.
        sample_index: int32[rows], the number of tokens generated before.
        shards: the part of the vocabulary in the logits; None for all of it.

    Returns:
        int32[rows], the same on every device.
    """
    return _choose(logits, _tempered(logits, rows, shards), rows, sample_index, shards)


def sample_fully(
    logits: jax.Array,
    rows: Rows,
    sample_index: jax.Array,
    *,
    num_tokens: jax.Array,
    slots: jax.Array,
    tables: SlotTables,
    masks: jax.Array,
    processors: tuple[LogitsProcessor, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """Returns one token for each row by all that `SamplingParams` knows; see `processed`.

    Args:
        logits, rows, sample_index: as in `sample`.
        num_tokens: int32[rows]; tokens of each sequence before the one that is sampled.
        slots: int32[rows]; where a row's tables and tokens are; the last slot is that of rows without any.
        tables: tables of the slots.
        masks: int32[rows, ceil(vocab / 32)], a bit for each token that grammar and bad words allow.
        processors: processors of the engine; a row takes part if its table has a number for it.

    Returns:
        int32[rows], and the logits float32[rows, vocab] before the temperature: -inf of tokens that cannot be sampled.
    """
    table = SlotTables(*(array[slots] for array in tables))
    changed = processed(logits, rows, sample_index, num_tokens, table, masks, processors)
    tempered = filtered(_tempered(changed, rows), rows)
    tokens = _choose(changed, tempered, rows, sample_index)
    return tokens, jnp.where((tempered > -jnp.inf) | (rows.temperature <= 0)[:, None], changed, -jnp.inf)


def processed(
    logits: jax.Array,
    rows: Rows,
    sample_index: jax.Array,
    num_tokens: jax.Array,
    table: SlotTables,
    masks: jax.Array,
    processors: tuple[LogitsProcessor, ...] = (),
) -> jax.Array:
    """Returns the logits that a greedy row takes the largest of, in vLLM's order.

    Masks of the host and of allowed tokens, min_tokens, logit_bias, the engine's processors, penalties. A
    row that this leaves nothing to choose from keeps its masks alone.

    Args:
        logits, rows, sample_index, num_tokens, masks, processors: as in `sample_fully`.
        table: one row for each of the logits'.
    """
    masked = jnp.where(_bits(masks & table.allowed, logits.shape[-1]), logits, -jnp.inf)
    changed = _forbid(masked, table, sample_index)
    changed = changed.at[jnp.arange(len(logits))[:, None], table.bias_tokens].add(table.bias, mode="drop")
    for index, processor in enumerate(processors):
        value = table.processor_values[:, index]
        processed = jax.vmap(processor)(changed, table.token_ids, rows.num_prompt_tokens, num_tokens, value)
        changed = jnp.where(jnp.isnan(value)[:, None], changed, processed.astype(changed.dtype))
    # Of two infinite ones none would be the larger, nor could one be drawn.
    changed = jnp.minimum(_penalized(changed, table.token_ids, rows, num_tokens), jnp.finfo(changed.dtype).max)
    return jnp.where(jnp.max(changed, axis=-1, keepdims=True) > -jnp.inf, changed, masked)


def filtered(logits: jax.Array, rows: Rows) -> jax.Array:
    """Applies min_p, top_k and top_p to logits whose largest is 0, without sorting: thresholds are found by halving."""
    vocab = logits.shape[-1]
    logits = jnp.where(jnp.exp(logits) >= rows.min_p[:, None], logits, -jnp.inf)
    # The bits of a float32 that is not positive, in the order of the floats.
    order = jax.lax.bitcast_convert_type(logits, jnp.int32)
    order = jnp.where(order < 0, order ^ 0x7FFFFFFF, order)
    wanted = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    threshold = _largest(lambda at: jnp.sum(order >= at[:, None], axis=-1, dtype=jnp.int32) >= wanted, len(logits))
    weights = jnp.where(order >= threshold[:, None], jnp.exp(logits), 0)
    mass = rows.top_p * jnp.sum(weights, axis=-1)
    reaches = lambda at: jnp.sum(jnp.where(order >= at[:, None], weights, 0), axis=-1) >= mass  # noqa: E731
    # Where all is kept a sum in another order must not decide.
    nucleus = jnp.where(rows.top_p < 1, _largest(reaches, len(logits)), threshold)
    return jnp.where(order >= jnp.maximum(nucleus, threshold)[:, None], logits, -jnp.inf)


def token_logprobs(
    logits: jax.Array,
    tokens: jax.Array,
    num_logprobs: int,
    shards: VocabShards | None = None,
    *,
    normalize: bool = True,
    batch_invariant: bool = False,
) -> Logprobs:
    """Returns the log-probabilities of int32[rows] tokens under float32[rows, vocab] logits, and the likeliest.

    Args:
        logits: of the whole vocabulary, or of this device's part.
        tokens: their ids in the whole vocabulary.
        num_logprobs: number of the likeliest tokens to report; 0 for a part of the vocabulary.
        shards: the part of the vocabulary in the logits; None for all of it.
        normalize: False returns logits instead of log-probabilities.
        batch_invariant: a row's bits depend on its logits alone, and are those of `jattn.token_logprobs`.
    """
    if batch_invariant and shards is not None:
        logits, shards = shards.gathered(logits), None
    largest = jnp.max(logits, axis=-1)
    total = lambda x: jnp.sum(x, axis=-1)  # noqa: E731
    if shards is None:
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    else:
        largest = jax.lax.pmax(largest, shards.axis)
        total = lambda x: jax.lax.psum(jnp.sum(x, axis=-1), shards.axis)  # noqa: E731
        ids = jax.lax.axis_index(shards.axis) * shards.count + jnp.arange(logits.shape[-1], dtype=jnp.int32)
        chosen = total(jnp.where(ids == tokens[:, None], logits, 0))
    normalizer = jnp.zeros_like(largest)
    if normalize and batch_invariant:
        normalizer = row_logsumexp(logits)
    elif normalize:
        # As jax.nn.logsumexp: a row without a finite logit has no largest to subtract.
        largest = jnp.where(jnp.isfinite(largest), largest, 0)
        normalizer = largest + jnp.log(total(jnp.exp(logits - largest[:, None])))
    rank = 1 + total((logits > chosen[:, None]).astype(jnp.int32))
    if not num_logprobs:
        return Logprobs(chosen - normalizer, rank)
    top, top_ids = likeliest(logits, num_logprobs)
    return Logprobs(chosen - normalizer, rank, top_ids, top - normalizer[:, None])


def likeliest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the `count` largest of each row of [rows, vocab] in descending order, and where they are.

    They are in the `count` groups with the largest maxima, so only a small array is sorted; a sort of the vocabulary
    costs more than a model's layer. Of equal values the earlier come first.
    """
    rows, vocab = logits.shape
    count = min(count, vocab)
    num_groups = -(-vocab // _GROUP)
    if count == 0 or num_groups <= 2 * count:
        return jax.lax.top_k(logits, count)
    padded = jnp.pad(logits, ((0, 0), (0, num_groups * _GROUP - vocab)), constant_values=-jnp.inf)
    groups = padded.reshape(rows, num_groups, _GROUP)
    _, best = jax.lax.top_k(jnp.max(groups, axis=-1), count)
    # In the order of the vocabulary, so that equal values stay in it.
    best = jnp.sort(best, axis=-1)
    inside = jnp.take_along_axis(groups, best[:, :, None], axis=1).reshape(rows, -1)
    top, places = jax.lax.top_k(inside, count)
    return top, jnp.take_along_axis(best, places // _GROUP, axis=1) * _GROUP + places % _GROUP


def _choose(
    logits: jax.Array, tempered: jax.Array, rows: Rows, sample_index: jax.Array, shards: VocabShards | None = None
) -> jax.Array:
    vocab_size = logits.shape[1] if shards is None else shards.vocab_size

    def draw() -> jax.Array:
        # By name: a user's default may be "rbg", whose draws under vmap depend on the whole batch.
        make_key = lambda seed, at: jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), at)  # noqa: E731
        keys = jax.vmap(make_key)(rows.seed, sample_index)
        # The Gumbel-max trick: an argmax over perturbed logits is a draw from their softmax.
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), logits.dtype))(keys)
        noise = noise if shards is None else shards.own(noise)
        return _largest_of(jnp.where(rows.temperature[:, None] > 0, tempered + noise, logits), shards)

    # The noise is a good part of a small model's step on a CPU. On a GPU XLA's conditional would make the host wait for
    # the step: there greedy batches are of a kind of their own.
    greedily = lambda: _largest_of(logits, shards)  # noqa: E731
    if_any = lambda: jax.lax.cond(jnp.any(rows.temperature > 0), draw, greedily)  # noqa: E731
    return jax.lax.platform_dependent(cpu=if_any, default=draw)


def _largest_of(scores: jax.Array, shards: VocabShards | None) -> jax.Array:
    return _likeliest(scores) if shards is None else shards.argmax(scores)


def _likeliest(logits: jax.Array) -> jax.Array:
    """Returns int32[rows], the argmax; XLA's argmax takes four times as long on a CPU."""
    places = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    is_largest = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_largest, places, logits.shape[-1] - 1), axis=-1)


def _tempered(logits: jax.Array, rows: Rows, shards: VocabShards | None = None) -> jax.Array:
    # Below the likeliest: with a tiny temperature the other logits then go to -inf; otherwise all would go to inf.
    likeliest = jnp.max(logits, axis=-1, keepdims=True)
    below = logits - (likeliest if shards is None else jax.lax.pmax(likeliest, shards.axis))
    return below / jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None]


def _bits(words: jax.Array, vocab_size: int) -> jax.Array:
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(len(words), -1)[:, :vocab_size] == 1


def _words(bits: jax.Array) -> jax.Array:
    """Returns uint32[rows, ceil(vocab / 32)] of bool[rows, vocab], the reverse of `_bits`."""
    padded = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % 32))).reshape(len(bits), -1, 32)
    return jnp.sum(padded.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def _forbid(logits: jax.Array, table: SlotTables, sample_index: jax.Array) -> jax.Array:
    """Bans stop tokens before min_tokens."""
    too_early = sample_index < table.min_tokens[:, 0]
    banned = jnp.where(too_early[:, None], table.stop_tokens, SlotTables.PAD)
    return logits.at[jnp.arange(len(logits))[:, None], banned].set(-jnp.inf, mode="drop")


def _penalized(logits: jax.Array, token_ids: jax.Array, rows: Rows, num_tokens: jax.Array) -> jax.Array:
    place = jnp.arange(token_ids.shape[1], dtype=jnp.int32)
    row = jnp.arange(len(logits))[:, None]
    zeros = jnp.zeros(logits.shape, jnp.int32)
    known, of_output = place < num_tokens[:, None], place >= rows.num_prompt_tokens[:, None]
    came = zeros.at[row, jnp.where(known, token_ids, SlotTables.PAD)].set(1, mode="drop")
    times = zeros.at[row, jnp.where(known & of_output, token_ids, SlotTables.PAD)].add(1, mode="drop")
    repeated = rows.repetition_penalty[:, None]
    logits = jnp.where(came > 0, jnp.where(logits > 0, logits / repeated, logits * repeated), logits)
    logits = logits - rows.frequency_penalty[:, None] * times
    return logits - rows.presence_penalty[:, None] * (times > 0)


def _largest(holds: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """Returns for each row the largest int32, from that of -inf to that of 0, that satisfies a monotone condition."""
    low = jnp.full(num_rows, np.float32(-np.inf).view(np.int32) ^ 0x7FFFFFFF, jnp.int32)

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        # Upwards, and without a sum that int32 does not hold.
        middle = low + ((high - low + 1) >> 1)
        fits = holds(middle)
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    return jax.lax.fori_loop(0, 31, halve, (low, jnp.zeros_like(low)))[0]
