"""Scores of pairs of texts: a cross-encoder's own, or the cosine of two vectors."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.llm.load import SentenceModules, TextTokenizer
from jattn.llm.models import Decoder
from jattn.llm.text.embeddings import batches, checked_model, embed
from jattn.llm.text.pairs import Pieces, as_pieces
from torch_core.base.checks import check_bool
from torch_core.base.errors import InvalidInput, Unsupported


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of one pair."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair's number, its score and its tokens; names are vLLM's."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: tuple[int, ...]


def score(
    model: object,
    tokenizer: TextTokenizer | None,
    text_1: str | Sequence[str],
    text_2: str | Sequence[str],
    *,
    cut: int | None,
    use_activation: bool,
    pooling: str | None,
    modules: SentenceModules | None = None,
) -> list[ScoringRequestOutput]:
    """Returns the score of each pair; see `LLM.score`."""
    whole = checked_model(model)
    check_bool("use_activation", use_activation)
    if tokenizer is None:
        raise InvalidInput("the model has no tokenizer, which texts to score need.")
    firsts, seconds = _texts("text_1", text_1), _texts("text_2", text_2)
    if len(firsts) not in (1, len(seconds)) or not seconds:
        wanted = "pass one text, or as many as text_2 has, which has at least one"
        raise InvalidInput("text_1", f"has {len(firsts)} texts and text_2 {len(seconds)}", wanted)
    longest, num_labels = whole.config.max_position_embeddings, whole.config.num_labels
    if num_labels == 0:
        if modules is not None and modules.do_lower_case:
            firsts, seconds = ([text.lower() for text in texts] for texts in (firsts, seconds))
        parts = [as_pieces(tokenizer, [(text,) for text in texts], longest, cut=cut) for texts in (firsts, seconds)]
        return _cosines(whole, *parts, pooling=pooling, modules=modules)
    if num_labels > 1:
        wanted = "a score needs a model with one"
        raise Unsupported("model", f"has {num_labels} labels", wanted)
    pairs = list(zip([*firsts] * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True))
    pieces = as_pieces(tokenizer, pairs, longest, cut=cut)
    logits = _labels(whole, pieces)[:, 0]
    if use_activation and whole.config.label_activation == "sigmoid":
        logits = np.asarray(jax.nn.sigmoid(jnp.asarray(logits)))
    return [
        _output(index, value, each.token_ids) for index, (value, each) in enumerate(zip(logits, pieces, strict=True))
    ]


def _texts(name: str, given: Any) -> list[str]:
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray | Mapping):
        raise InvalidInput(name, f"is a {type(given).__name__}", "pass a text or a list of them")
    texts = list(given)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidInput(f"{name}[{index}]", value=text, wanted="it must be a text")
    return texts


def _cosines(model: Decoder, firsts: list[Pieces], seconds: list[Pieces], **options: Any) -> list[ScoringRequestOutput]:
    prompts = [each.token_ids for each in (*firsts, *seconds)]
    vectors = [each.outputs.embedding for each in embed(model, prompts, normalize=True, **options)]
    found = []
    for index, second in enumerate(seconds):
        place = index if len(firsts) > 1 else 0
        value = vectors[place] @ vectors[len(firsts) + index]
        found.append(_output(index, value, [*firsts[place].token_ids, *second.token_ids]))
    return found


def _output(index: int, value: Any, token_ids: Sequence[int]) -> ScoringRequestOutput:
    return ScoringRequestOutput(str(index), ScoringOutput(float(value)), tuple(token_ids))


def _labels(model: Decoder, pieces: Sequence[Pieces]) -> np.ndarray:
    """Returns float32[pieces, num_labels], logits."""
    graph, state = nnx.split(model)
    found = np.empty((len(pieces), model.config.num_labels), np.float32)
    most = max(model.config.token_types - 1, 0)
    for places, tokens, lengths in batches([each.token_ids for each in pieces], model.config.max_position_embeddings):
        types = np.zeros_like(tokens)
        for row, place in enumerate(places):
            types[row, : lengths[row]] = np.minimum(pieces[place].types, most)
        found[list(places)] = np.asarray(_label_logits(graph, state, tokens, lengths, types))[: len(places)]
    return found


@functools.partial(jax.jit, static_argnums=0)
def _label_logits(graph: Any, state: Any, tokens: Any, lengths: Any, types: Any) -> jax.Array:
    return nnx.merge(graph, state).label_logits(tokens, lengths, types)
