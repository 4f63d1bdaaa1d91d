"""What a step computes on the device: the model over one batch, the sampler, and further decode steps in a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.engine.logprobs import Logprobs, token_logprobs
from jattn.engine.sampler import Rows, Sampler, SamplerState, SamplingKind
from jattn.metadata import AttentionMetadata
from jattn.models import PagedModel
from torch_core.metadata import PackedLayout
from torch_core.specs import PAD_SLOT_ID

__all__ = ["PER_SEQUENCE", "Sampled", "jitted_prompt_logprobs", "jitted_step"]

#: What a step needs to know of each sequence besides the metadata, int32 all: `Rows`, and two that change.
PER_SEQUENCE = (("sampling", (len(Rows._fields),)), ("sample_index", ()), ("slot", ()))

KVCaches = tuple[jax.Array, ...]
Fields = dict[str, jax.Array]
# Merged where it is called: nnx lets a module change (a random stream counts) at its own level of tracing only.
Model = Callable[[], PagedModel]


class Sampled(NamedTuple):
    """What a step brings.

    Attributes:
        tokens: int32[num_steps, max_num_seqs], a column for each row.
        logprobs: of the tokens, the same leading axes; None of a plain step, and so are the hidden states.
        hidden: [tokens, ...], where the step was one.
    """

    tokens: Any
    logprobs: Logprobs | None
    hidden: Any


@functools.lru_cache(maxsize=8)
def jitted_step(graph: Any, treedef: Any) -> tuple[Any, list[str]]:
    """Returns the jitted step of one kind of model and the list of its traces.

    The step is `step(kv_caches, leaves, last_tokens, state, buffer, *, layout, max_query_len, num_steps, sampler,
    max_num_seqs)` and returns `((Sampled, last_tokens int32[max_num_seqs], state), kv_caches)`. It consumes kv_caches.
    An input token of `-1 - row` stands for `last_tokens[row]`.
    """
    programs: list[str] = []
    # donate_argnums=0 is the pool: KVPool.run refuses a step that does not consume it.
    step = jax.jit(
        functools.partial(_step, programs, graph, treedef),
        donate_argnums=0,
        static_argnames=("layout", "max_query_len", "num_steps", "sampler", "max_num_seqs"),
    )
    return step, programs


@functools.lru_cache(maxsize=8)
def jitted_prompt_logprobs(graph: Any, treedef: Any) -> Any:
    """Returns the jitted `f(leaves, hidden, rows int32[n], token_ids int32[n], *, num_logprobs) -> Logprobs`."""

    def compute(
        leaves: list[jax.Array], hidden: jax.Array, rows: jax.Array, token_ids: jax.Array, *, num_logprobs: int
    ) -> Logprobs:
        model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        return token_logprobs(model.logits(hidden[rows]).astype(jnp.float32), token_ids, num_logprobs)

    return jax.jit(compute, static_argnames="num_logprobs")


def _step(
    programs: list[str],
    graph: Any,
    treedef: Any,
    kv_caches: KVCaches,
    leaves: list[jax.Array],
    last_tokens: jax.Array,
    state: SamplerState,
    buffer: jax.Array,
    *,
    layout: PackedLayout,
    max_query_len: int,
    num_steps: int,
    sampler: Sampler,
    max_num_seqs: int,
) -> tuple[tuple[Sampled, jax.Array, SamplerState], KVCaches]:
    fields = layout.unpack(buffer)
    num_seqs, num_tokens = fields["seq_lens"].shape[0], fields["token_ids"].shape[0]
    # Runs when JAX traces, so the list counts compilations.
    programs.append(
        f"{num_seqs} sequences, {num_tokens} tokens, queries up to {max_query_len}, "
        + (f"{num_steps} steps, " if num_steps > 1 else "")
        + sampler.kind.value
    )

    def model() -> PagedModel:
        return nnx.merge(graph, jax.tree.unflatten(treedef, leaves))

    token_ids = fields["token_ids"]
    token_ids = jnp.where(token_ids < 0, last_tokens[jnp.maximum(-1 - token_ids, 0)], token_ids)
    # A setting for the user's own code; the model's is written with NumPy's rules in mind.
    with jax.numpy_rank_promotion("allow"):
        if num_steps == 1:
            sampled, state, kv_caches = _sampled(model, kv_caches, token_ids, fields, max_query_len, state, sampler)
            sampled = sampled._replace(
                tokens=sampled.tokens[None], logprobs=jax.tree.map(lambda array: array[None], sampled.logprobs)
            )
        else:
            sampled, state, kv_caches = _decoded(model, kv_caches, token_ids, fields, num_steps, state, sampler)
    tokens = jnp.zeros((num_steps, max_num_seqs), jnp.int32).at[:, :num_seqs].set(sampled.tokens)
    return (sampled._replace(tokens=tokens), tokens[-1], state), kv_caches


def _decoded(
    model: Model,
    kv_caches: KVCaches,
    token_ids: jax.Array,
    fields: Fields,
    num_steps: int,
    state: SamplerState,
    sampler: Sampler,
) -> tuple[Sampled, SamplerState, KVCaches]:
    """Decodes up to `num_steps` tokens of each sequence, as many as it has slots in this batch, one by one."""
    first = fields["query_start_loc"][:-1]
    num_slots = jnp.diff(fields["query_start_loc"])
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
            "slot_mapping": jnp.where(wanted, fields["slot_mapping"][first + done], PAD_SLOT_ID),
            "sample_index": fields["sample_index"] + done,
            "slot": jnp.where(wanted, fields["slot"], state.neutral_slot),
        }
        sampled, state, kv_caches = _sampled(model, kv_caches, token_ids, now, 1, state, sampler)
        token_ids = jnp.where(wanted, sampled.tokens, token_ids)
        return (token_ids, state, kv_caches), sampled._replace(tokens=token_ids, hidden=None)

    indices = jnp.arange(num_steps, dtype=jnp.int32)
    (_, state, kv_caches), sampled = jax.lax.scan(decode, (token_ids, state, kv_caches), indices)
    return sampled, state, kv_caches


def _sampled(
    model: Model,
    kv_caches: KVCaches,
    token_ids: jax.Array,
    fields: Fields,
    max_query_len: int,
    state: SamplerState,
    sampler: Sampler,
) -> tuple[Sampled, SamplerState, KVCaches]:
    metadata = AttentionMetadata(
        block_tables=fields["block_tables"],
        seq_lens=fields["seq_lens"],
        query_start_loc=fields["query_start_loc"],
        slot_mapping=fields["slot_mapping"],
        max_query_len=max_query_len,
    )
    merged = model()
    hidden, kv_caches = merged(token_ids, fields["positions"], kv_caches, metadata)
    last_rows = jnp.maximum(fields["query_start_loc"][1:] - 1, 0)
    tokens, logprobs, state = sampler(
        merged.logits(hidden[last_rows]).astype(jnp.float32),
        Rows.unpack(fields["sampling"]),
        state,
        sample_index=fields["sample_index"],
        num_tokens=fields["seq_lens"],
        slots=fields["slot"],
    )
    return Sampled(tokens, logprobs, None if sampler.kind is SamplingKind.PLAIN else hidden), state, tuple(kv_caches)
