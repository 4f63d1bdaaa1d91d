"""A step's computation on the device: the model over one batch, the sampler, and further decode steps in a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jattn.llm.engine.device.adapters import AdapterLayout
from jattn.llm.engine.device.buckets import Bucket
from jattn.llm.engine.device.draft import WithDraft
from jattn.llm.engine.device.placement import Placement
from jattn.llm.engine.device.routing import NO_EXPERT
from jattn.llm.engine.device.sampler import Rows, VocabShards, token_logprobs
from jattn.llm.engine.device.tables import SamplerState
from jattn.llm.engine.device.weights import Structure
from jattn.llm.engine.options.params import SamplingKind
from jattn.llm.engine.request.outputs import Logprobs
from jattn.llm.models import BatchAdapters, Decoder, TensorParallel
from jattn.llm.models.request_inputs import InputDtypes, unpacked
from jattn.metadata import AttentionMetadata, GroupedMetadata, PrefixGroups
from jattn.ops import DeferredStates
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import PAD_SLOT_ID
from torch_core.cache import LayerGroups
from torch_core.metadata import group_fields

KVCaches = tuple[jax.Array, ...]
Fields = dict[str, jax.Array]
# Merged at the call: nnx allows changes of a module (a random stream counts) only at its own level of tracing. Only
# models with an encoder have `encode`, and only models with a draft have its methods.
Model = Callable[[], Any]


@dataclass(frozen=True)
class _Batch:
    """The arguments of one run of a model; the caches and the sampler's state are consumed.

    Attributes:
        model: merges the model.
        layers: its cache groups.
        bucket: the padded sizes.
        fields: the step's arrays by name.
        token_ids: int32[tokens].
        state: of the sampler.
        kv_caches: of all layers.
        peers: see `AttentionMetadata`.
        routes: report the experts of each token.
        inputs: names and dtypes of the numbers of each request.
        adapters: the memory of adapters, for a bucket with adapters, and its layout.
    """

    model: Model
    layers: LayerGroups
    bucket: Bucket
    fields: Fields
    token_ids: jax.Array
    state: SamplerState
    kv_caches: KVCaches
    peers: jax.Array | None
    routes: bool
    inputs: InputDtypes = ()
    adapters: tuple[tuple[jax.Array, ...], AdapterLayout] | None = None

    @property
    def metadata(self) -> Any:
        """One record if the model has one cache group, and otherwise one for each."""
        fields, bucket, layers = self.fields, self.bucket, self.layers
        inputs = unpacked(fields["inputs"], self.inputs) if self.inputs else {}
        cross = bucket.num_encoder_blocks > 0 and not bucket.encodes
        groups = tuple(
            replace(
                AttentionMetadata.of_fields(fields, max_query_len=bucket.max_query_len, cache_group=index, cross=cross),
                defers_states=bucket.num_guesses > 0,
                # Found in the tables of the first group.
                groups=_groups(fields, bucket) if index == 0 else None,
                peers=self.peers,
                inputs=inputs,
            )
            for index in range(len(layers.groups))
        )
        if self.adapters is not None:
            (arrays, layout), first = self.adapters, groups[0]
            num_tokens = self.token_ids.size
            slots = first.of_tokens(fields["adapter"] - 1, num_tokens)
            is_token = jnp.arange(num_tokens, dtype=jnp.int32) < first.query_start_loc[-1]
            adapters = layout.batch(arrays, jnp.where(is_token, slots, -1))
            groups = tuple(replace(group, adapters=adapters) for group in groups)
        if len(groups) == 1:
            return groups[0]
        return GroupedMetadata(cache_groups=groups, layer_groups=layers.layer_groups, layer_arrays=layers.layer_arrays)

    @property
    def picks_rows(self) -> bool:
        """Whether nothing needs the hidden states of tokens that are not the last of their sequence."""
        needs = self.bucket.decodes or self.routes or len(self.layers.groups) > 1
        return not needs and self.bucket.sampler.kind is not SamplingKind.FULL

    def head_adapters(self, rows_of_each: int) -> tuple[BatchAdapters, ...]:
        """Returns the adapters of as many hidden states of each sequence; none of a bucket without."""
        if self.adapters is None:
            return ()
        (arrays, layout), slots = self.adapters, self.fields["adapter"] - 1
        return (layout.batch(arrays, jnp.repeat(slots, rows_of_each), of_heads=True),)


class Sampled(NamedTuple):
    """The results of a step.

    Attributes:
        tokens: int32[num_samples, max_num_seqs], a column for each row; -1 after a wrong guess.
        logprobs: log-probabilities of the tokens, the same leading axes; None of a plain step, and so are the hidden
            states.
        hidden: [tokens, ...], if the step was one.
        experts: int16[tokens, layers, top_k], experts of each token in the order of the slots, if the engine records
            them.
    """

    tokens: Any
    logprobs: Logprobs | None
    hidden: Any
    experts: Any = None


def jitted_step(
    structure: Structure,
    placement: Placement,
    layers: LayerGroups,
    cache_specs: tuple[Any, ...],
    leaf_specs: Any,
    *,
    routes: bool = False,
    adapters: AdapterLayout | None = None,
) -> Any:
    """Returns the jitted step of one kind of model and of its cache groups.

    The step is `step(kv_caches, leaves, last_tokens, state, buffer, peers, adapters, *, bucket, max_blocks)`, and its
    result `((Sampled, last_tokens int32[max_num_seqs], state), kv_caches)`. It consumes kv_caches. An input token of
    `-1 - row` is for `last_tokens[row]`.

    Args:
        structure: the model's, or that of one device's part of it.
        placement: the devices; each runs the step on its own part, and all have the results.
        layers: the cache groups.
        cache_specs: partition specs of the caches.
        leaf_specs: partition specs of the leaves.
        routes: report the experts of each token.
        adapters: layout of the adapters' memory, which steps of buckets with adapters are given, and others not.
    """
    whole = PartitionSpec()

    def step(*operands: Any, **sizes: Any) -> Any:
        split = whole if adapters is None or operands[-1] is None else adapters.specs
        return placement.mapped(
            functools.partial(_step, structure, layers, routes, adapters, **sizes),
            in_specs=(cache_specs, list(leaf_specs), whole, whole, whole, PartitionSpec("tp"), split),
            out_specs=(whole, cache_specs),
        )(*operands)

    # donate_argnums=0 is the pool: KVPool.run refuses a step that does not consume it.
    return jax.jit(step, donate_argnums=0, static_argnames=("bucket", "max_blocks"))


@functools.lru_cache(maxsize=8)
def jitted_prompt_logprobs(
    structure: Structure,
    placement: Placement,
    leaf_specs: tuple[Any, ...],
    *,
    batch_invariant: bool = False,
    adapters: AdapterLayout | None = None,
) -> Any:
    """Returns the jitted `f(leaves, hidden[n, hidden_size], token_ids int32[n], adapter, *, num_logprobs) -> Logprobs`.

    `adapter` is the memory of adapters and the slot of the prompt's, int32[]; None without one.
    """

    def compute(
        leaves: list[jax.Array], hidden: jax.Array, token_ids: jax.Array, adapter: Any, *, num_logprobs: int
    ) -> Logprobs:
        model, own = structure.merge(leaves), ()
        if adapter is not None and adapters is not None:
            arrays, slot = adapter
            own = (adapters.batch(arrays, jnp.broadcast_to(slot, (len(hidden),)), of_heads=True),)
        logits, shards = _logits(model, hidden, *own)
        logits = logits if shards is None else shards.gathered(logits)
        return token_logprobs(logits, token_ids, num_logprobs, batch_invariant=batch_invariant)

    def run(*operands: Any, num_logprobs: int) -> Logprobs:
        whole, compute_some = PartitionSpec(), functools.partial(compute, num_logprobs=num_logprobs)
        split = whole if adapters is None or operands[-1] is None else (adapters.specs, whole)
        return placement.mapped(compute_some, (list(leaf_specs), whole, whole, split), whole)(*operands)

    return jax.jit(run, static_argnames="num_logprobs")


def _step(
    structure: Structure,
    layers: LayerGroups,
    routes: bool,
    adapter_layout: AdapterLayout | None,
    kv_caches: KVCaches,
    leaves: list[jax.Array],
    last_tokens: jax.Array,
    state: SamplerState,
    buffer: jax.Array,
    peers: jax.Array | None,
    adapters: tuple[jax.Array, ...] | None,
    *,
    bucket: Bucket,
    max_blocks: int,
) -> tuple[tuple[Sampled, jax.Array, SamplerState], KVCaches]:

    def model() -> Any:
        return structure.merge(leaves)

    inputs = model().paged_spec.inputs
    fields = bucket.layout(max_blocks, len(layers.groups), len(inputs)).unpack(buffer)

    token_ids = fields["token_ids"]
    token_ids = jnp.where(token_ids < 0, last_tokens[jnp.maximum(-1 - token_ids, 0)], token_ids)
    if not model().paged_spec.states:
        del fields["state_slots"]
    held = None if adapters is None or adapter_layout is None else (adapters, adapter_layout)
    batch = _Batch(model, layers, bucket, fields, token_ids, state, kv_caches, peers, routes, inputs, held)
    # A setting for the user's own code; the model's is written with NumPy's rules in mind.
    with jax.numpy_rank_promotion("allow"):
        if bucket.encodes:
            kv_caches = model().encode(token_ids, fields["positions"], kv_caches, batch.metadata)
            # The tokens only say when the step is done.
            return (Sampled(jnp.zeros((1, last_tokens.size), jnp.int32), None, None), last_tokens, state), kv_caches
        if bucket.num_steps > 1:
            sampled, state, kv_caches = _decoded(batch)
        elif bucket.num_guesses:
            sampled, state, kv_caches = _verified(batch)
        else:
            sampled, state, kv_caches = _sampled(batch)
    tokens = jnp.pad(sampled.tokens, ((0, 0), (0, last_tokens.size - bucket.num_seqs)))
    return (sampled._replace(tokens=tokens), tokens[-1], state), kv_caches


def _decoded(batch: _Batch) -> tuple[Sampled, SamplerState, KVCaches]:
    """Decodes up to `bucket.num_steps` tokens of each sequence, as many as it has slots in this batch, one by one."""
    fields = batch.fields
    first = fields["query_start_loc"][:-1]
    num_slots = jnp.diff(fields["query_start_loc"])
    slot_mappings = [group_fields(group)[1] for group in range(len(batch.layers.groups))]
    # int32 by name: under JAX_ENABLE_X64 the defaults are 64 bits wide.
    one_each = jnp.minimum(jnp.arange(first.size + 1, dtype=jnp.int32), (num_slots > 0).sum(dtype=jnp.int32))

    def decode(carry: tuple[Any, ...], index: jax.Array) -> tuple[tuple[Any, ...], Sampled]:
        token_ids, state, kv_caches = carry
        # A sequence without a slot left stays at its last one, writes nothing and keeps its token.
        wanted = index < num_slots
        done = jnp.where(wanted, index, jnp.maximum(num_slots - 1, 0))
        now = fields | {
            "positions": fields["positions"][first + done],
            "seq_lens": fields["seq_lens"] - jnp.maximum(num_slots - 1, 0) + done,
            "query_start_loc": one_each,
            **{name: jnp.where(wanted, fields[name][first + done], PAD_SLOT_ID) for name in slot_mappings},
            "sample_index": fields["sample_index"] + done,
            "slot": jnp.where(wanted, fields["slot"], state.neutral_slot),
        }
        if "state_slots" in fields:
            now["state_slots"] = jnp.where(wanted, fields["state_slots"], -1)
        sampled, state, kv_caches = _sampled(
            replace(batch, fields=now, token_ids=token_ids, state=state, kv_caches=kv_caches)
        )
        token_ids = jnp.where(wanted, sampled.tokens[0], token_ids)
        logprobs = jax.tree.map(lambda array: array[0], sampled.logprobs)
        return (token_ids, state, kv_caches), Sampled(token_ids, logprobs, None, sampled.experts)

    indices = jnp.arange(batch.bucket.num_steps, dtype=jnp.int32)
    (_, state, kv_caches), sampled = jax.lax.scan(decode, (batch.token_ids, batch.state, batch.kv_caches), indices)
    if sampled.experts is not None:
        places = jnp.where(indices[:, None] < num_slots, first + indices[:, None], batch.bucket.num_tokens)
        none = jnp.full((batch.bucket.num_tokens, *sampled.experts.shape[2:]), NO_EXPERT, jnp.int16)
        sampled = sampled._replace(experts=none.at[places].set(sampled.experts, mode="drop"))
    return sampled, state, kv_caches


def _verified(batch: _Batch) -> tuple[Sampled, SamplerState, KVCaches]:
    """Samples after each token of the rows, including proposals, and keeps only tokens after accepted proposals."""
    token_ids = batch.token_ids
    first = batch.fields["query_start_loc"][:-1]
    num_slots = jnp.diff(batch.fields["query_start_loc"])
    places = jnp.arange(1, batch.bucket.num_samples, dtype=jnp.int32)[:, None]
    is_guess = places < num_slots
    if isinstance(batch.model(), WithDraft):
        guesses, kv_caches = _drafted(replace(batch, token_ids=token_ids[first]))
        token_ids = token_ids.at[jnp.where(is_guess, first + places, token_ids.size)].set(guesses, mode="drop")
        batch = replace(batch, token_ids=token_ids, kv_caches=kv_caches)
    sampled, state, kv_caches = _sampled(batch)
    # Each place is sampled with the key that it has without speculation, so the tokens are the same ones. For a guess
    # that is certain of itself, to keep it where it was drawn is the rejection rule of arXiv:2211.17192.
    is_right = is_guess & (sampled.tokens[:-1] == token_ids[jnp.minimum(first + places, token_ids.size - 1)])
    is_right = jnp.cumprod(is_right, axis=0, dtype=jnp.int32)
    tokens = sampled.tokens.at[1:].set(jnp.where(is_right > 0, sampled.tokens[1:], -1))
    num_kept = jnp.minimum(num_slots, 1) + is_right.sum(axis=0, dtype=jnp.int32)
    kept = (each.after(num_kept) if isinstance(each, DeferredStates) else each for each in kv_caches)
    return sampled._replace(tokens=tokens), state, tuple(kept)


def _drafted(batch: _Batch) -> tuple[jax.Array, KVCaches]:
    """Returns int32[num_guesses, num_seqs], the draft model's tokens after each row's first token, and all caches."""
    bucket, model = batch.bucket, batch.model
    count = bucket.num_guesses
    sampler = replace(bucket.sampler, num_logprobs=0)
    alone = replace(
        bucket, num_tokens=bucket.num_seqs * count, max_query_len=1, sampler=sampler, num_steps=count, num_guesses=0
    )
    # Who has a slot has no guesses.
    fields = batch.fields | {"slot": jnp.full_like(batch.fields["slot"], batch.state.neutral_slot)}
    own, drafts = model().split(batch.kv_caches)
    num_states = model().draft.paged_spec.num_state_arrays
    blocks, held = drafts[: len(drafts) - num_states], drafts[len(drafts) - num_states :]
    states = ()
    if held:
        # Copies: the verification advances the states themselves, by accepted tokens.
        slots = fields["state_slots"]
        states = tuple(each[jnp.maximum(slots, 0)] for each in held)
        fields["state_slots"] = jnp.where(slots < 0, slots, jnp.arange(slots.size, dtype=jnp.int32))
    sampled, _, drafts = _decoded(
        replace(
            batch,
            model=lambda: model().draft,
            bucket=alone,
            fields=fields,
            kv_caches=(*blocks, *states),
            routes=False,
            adapters=None,
        )
    )
    return sampled.tokens, model().joined(own, (*drafts[: len(blocks)], *held))


def _sampled(batch: _Batch) -> tuple[Sampled, SamplerState, KVCaches]:
    model, bucket, fields, state = batch.model(), batch.bucket, batch.fields, batch.state
    operands, experts = (batch.token_ids, fields["positions"], batch.kv_caches), None
    last_rows = jnp.maximum(fields["query_start_loc"][1:] - 1, 0)
    picks = batch.picks_rows and isinstance(model, Decoder) and model.layers[-1].picks_rows
    if picks:
        hidden, kv_caches = model(*operands, replace(batch.metadata, result_rows=last_rows))
    elif batch.routes:
        hidden, kv_caches, found = model.with_routed_experts(*operands, batch.metadata)
        experts = found.astype(jnp.int16)
    else:
        hidden, kv_caches = model(*operands, batch.metadata)
        _check_returned(batch, hidden, kv_caches)
    count = 1 + bucket.num_guesses
    places = jnp.arange(count, dtype=jnp.int32)
    first = fields["query_start_loc"][:-1] if bucket.num_guesses else last_rows
    rows = jnp.minimum(first[:, None] + places, last_rows[:, None])
    num_tokens = fields["seq_lens"] - (last_rows - first)
    # A row with a slot has no proposals: tokens drawn after its first position are unused.
    slots = jnp.where(places == 0, fields["slot"][:, None], state.neutral_slot)
    read = hidden if picks else hidden[rows.reshape(-1)]
    logits, shards = _logits(model, read, *batch.head_adapters(count), peers=batch.peers)
    tokens, logprobs, new_state = bucket.sampler(
        logits,
        Rows.unpack(jnp.repeat(fields["sampling"], count, axis=0)),
        state if state.masks is None else state._replace(masks=jnp.repeat(state.masks, count, axis=0)),
        sample_index=(fields["sample_index"][:, None] + places).reshape(-1),
        num_tokens=(num_tokens[:, None] + places).reshape(-1),
        slots=slots.reshape(-1),
        shards=shards,
    )
    by_place = lambda array: array.reshape(bucket.num_seqs, count, *array.shape[1:]).swapaxes(0, 1)  # noqa: E731
    sampled = Sampled(
        by_place(tokens),
        jax.tree.map(by_place, logprobs),
        hidden if bucket.sampler.kind is SamplingKind.FULL else None,
        experts,
    )
    return sampled, new_state._replace(masks=state.masks), tuple(kv_caches)


def _check_returned(batch: _Batch, hidden: jax.Array, kv_caches: KVCaches) -> None:
    # Without these, a module's mistake would give other tokens: XLA clamps indices.
    if len(hidden) != len(batch.token_ids):
        wanted = f"the model returns a row for each of the {len(batch.token_ids)} tokens"
        raise InvalidInput("hidden", f"has shape {hidden.shape}", wanted)
    if all(new is old for new, old in zip(kv_caches, batch.kv_caches, strict=False)):
        raise InvalidInput("kv_caches", "are those that the model was given", "return those that its layers return")


def _logits(
    model: Any, hidden: jax.Array, *adapters: BatchAdapters, peers: jax.Array | None = None
) -> tuple[jax.Array, VocabShards | None]:
    """Returns float32[rows, vocab], or this device's part of it and which part it is.

    Only decoders take adapters.
    """
    logits = model.logits(hidden, *adapters).astype(jnp.float32)
    parallel: TensorParallel | None = getattr(model, "parallel", None)
    if parallel is None or parallel.parts("vocab") == 1:
        wanted = (len(hidden), model.paged_spec.vocab_size)
        if logits.shape != wanted:
            raise InvalidInput("logits", f"have shape {logits.shape}", f"those of the paged_spec are {wanted}")
        return logits, None
    return logits, VocabShards(parallel.axis, model.paged_spec.vocab_size, logits.shape[-1], peers)


def _groups(fields: Fields, bucket: Bucket) -> PrefixGroups | None:
    if not bucket.piece_tokens:
        return None
    return PrefixGroups(
        prefix_lens=fields["prefix_lens"], piece_starts=fields["piece_starts"], piece_tokens=bucket.piece_tokens
    )
