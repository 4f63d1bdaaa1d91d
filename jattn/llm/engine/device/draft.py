"""A draft model together with its target model: one module, one flat tuple of caches, the same block tables."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import cast

import jax
from flax import nnx

from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.load import load_model
from jattn.llm.models import BatchAdapters, PagedModel, PagedSpec, RoutedModel, TensorParallel
from jattn.metadata import AttentionMetadata
from torch_core.base.errors import InvalidInput


class WithDraft(nnx.Module):
    """A `PagedModel` that is `base`, and keeps the caches of `draft` as far as its own.

    Every token that the one computes the other computes, too. So a cached prefix, a fork, a copied or a swapped block
    holds for both.

    Args:
        base: the model whose tokens are wanted.
        draft: the one that guesses them.
    """

    def __init__(self, base: PagedModel, draft: PagedModel) -> None:
        # nnx sorts by name: arrays that both hold belong to the base.
        self.base, self.draft = base, draft

    @property
    def paged_spec(self) -> PagedSpec:
        """The base's, with the states of both."""
        spec = self.base.paged_spec
        return replace(spec, states=(*spec.states, *self.draft.paged_spec.states))

    @property
    def parallel(self) -> TensorParallel | None:
        """The split of the base model."""
        return getattr(self.base, "parallel", None)

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, kv_caches: tuple[jax.Array, ...], metadata: AttentionMetadata
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Runs both over the same tokens; returns the base's hidden states, and its caches before the draft's."""
        own, drafts = self.split(kv_caches)
        hidden, own = self.base(token_ids, positions, own, metadata)
        # Adapters are the base's: with others the draft guesses as well, or worse.
        _, drafts = self.draft(token_ids, positions, drafts, replace(metadata, adapters=None))
        return hidden, self.joined(own, drafts)

    def with_routed_experts(
        self, token_ids: jax.Array, positions: jax.Array, kv_caches: tuple[jax.Array, ...], metadata: AttentionMetadata
    ) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
        """Returns the results of a call and the experts of the base."""
        own, drafts = self.split(kv_caches)
        hidden, own, experts = cast(RoutedModel, self.base).with_routed_experts(token_ids, positions, own, metadata)
        _, drafts = self.draft(token_ids, positions, drafts, replace(metadata, adapters=None))
        return hidden, self.joined(own, drafts), experts

    def logits(self, hidden: jax.Array, *adapters: BatchAdapters) -> jax.Array:
        """Returns the base's."""
        return self.base.logits(hidden, *adapters)

    def split(self, kv_caches: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Returns the base's caches and the draft's, the states of each at the end."""
        spec, num_drafts = self.base.paged_spec, self.draft.paged_spec.num_state_arrays
        ends = spec.num_arrays, len(kv_caches) - num_drafts - spec.num_state_arrays, len(kv_caches) - num_drafts
        own, drafts, states, draft_states = (kv_caches[slice(*each)] for each in pairwise((0, *ends, None)))
        return (*own, *states), (*drafts, *draft_states)

    def joined(self, own: tuple[jax.Array, ...], drafts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Returns the inverse of `split`: the caches of both, then the states of both."""
        first, second = (
            len(caches) - model.paged_spec.num_state_arrays
            for caches, model in ((own, self.base), (drafts, self.draft))
        )
        return (*own[:first], *drafts[:second], *own[first:], *drafts[second:])


def with_draft(model: PagedModel, config: EngineConfig, max_model_len: int) -> PagedModel:
    """Returns the model, together with the draft model that the config names, if any.

    Args:
        model: the engine's.
        config: config of the engine.
        max_model_len: tokens of one sequence.

    Raises:
        InvalidInput: a draft that is no model, cannot be loaded, or does not fit.
    """
    speculative = config.speculation
    if speculative is None or speculative.model is None:
        return model
    given, draft = speculative.model, speculative.model
    if not isinstance(given, nnx.Module):
        asked = [getattr(module, "implementation", None) for _, module in nnx.iter_modules(cast(nnx.Module, model))]
        implementation = next(filter(None, asked), None)
        draft, *_ = load_model(given, dtype=model.paged_spec.dtype, implementation=implementation, with_tokenizer=False)
    _check(draft, model.paged_spec, max_model_len)
    return WithDraft(model, cast(PagedModel, draft))


def _check(draft: object, base: PagedSpec, max_model_len: int) -> None:
    spec = getattr(draft, "paged_spec", None)
    if not isinstance(spec, PagedSpec):
        raise InvalidInput(f"the draft model is a {type(draft).__name__}; it must be a jattn.llm.models.PagedModel.")
    if base.max_encoder_len or spec.max_encoder_len:
        raise InvalidInput(
            "a draft model cannot guess beside an encoder, whose output one of the two does not see; use n-grams."
        )
    if spec.vocab_size != base.vocab_size:
        raise InvalidInput(
            f"the draft model has a vocabulary of {spec.vocab_size} and the model one of {base.vocab_size}; their "
            "tokens must be the same."
        )
    if spec.max_model_len < max_model_len:
        raise InvalidInput(
            f"the draft model was made for {spec.max_model_len} tokens at most and the engine for {max_model_len}; "
            f"set EngineConfig(max_model_len={spec.max_model_len})."
        )
