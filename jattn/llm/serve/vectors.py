"""The answers about vectors: embeddings in OpenAI's form, scores in vLLM's, reranked documents in Jina's."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn.llm.engine import ScoringRequestOutput
from jattn.llm.serve.bodies import EmbeddingsBody, RerankBody, ScoreBody
from jattn.llm.serve.config import ServeConfig
from jattn.llm.serve.models import ServedModel
from jattn.llm.text.embeddings import shortened
from torch_core.base.errors import InvalidInput


def embeddings_answer(model: ServedModel, asked: EmbeddingsBody, config: ServeConfig) -> dict[str, Any]:
    """Returns float32[hidden_size] per prompt, as numbers or as little-endian bytes in base64."""
    if asked.dimensions is not None and not config.matryoshka:
        wanted = "vectors have the model's own size: leave it out, or start the server with --matryoshka"
        raise InvalidInput("dimensions", value=asked.dimensions, wanted=wanted)
    found = model.llm.llm.embed(
        asked.prompts,
        pooling=asked.pooling,
        normalize=asked.normalize,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
        prompt_name=asked.prompt_name,
    )
    vectors = [each.outputs.embedding for each in found]
    if asked.dimensions is not None:
        vectors = shortened(vectors, asked.dimensions, normalize=asked.normalize)
    written = _base64 if asked.encoding_format == "base64" else np.ndarray.tolist
    data = [{"object": "embedding", "index": index, "embedding": written(each)} for index, each in enumerate(vectors)]
    return {"object": "list", "data": data, "model": model.name, "usage": _usage(found)}


def score_answer(model: ServedModel, asked: ScoreBody, config: ServeConfig) -> dict[str, Any]:
    """Returns the score of each pair."""
    found = _scores(model, asked, *asked.pairs)
    data = [{"index": index, "object": "score", "score": each.outputs.score} for index, each in enumerate(found)]
    return _head("score", model) | {"object": "list", "data": data, "usage": _usage(found)}


def rerank_answer(model: ServedModel, asked: RerankBody, config: ServeConfig) -> dict[str, Any]:
    """Returns the documents that fit the query best, with their scores, the best one first."""
    texts = asked.texts
    found = _scores(model, asked, [asked.query], texts)
    # Of equal scores the first document comes first.
    order = sorted(range(len(found)), key=lambda index: -found[index].outputs.score)[: asked.top_n or len(found)]
    results = [
        {
            "index": index,
            **({"document": {"text": texts[index]}} if asked.return_documents else {}),
            "relevance_score": found[index].outputs.score,
        }
        for index in order
    ]
    return _head("rerank", model) | {"results": results, "usage": _usage(found)}


def _scores(
    model: ServedModel, asked: ScoreBody | RerankBody, firsts: Sequence[str], seconds: Sequence[str]
) -> list[ScoringRequestOutput]:
    return model.llm.llm.score(
        firsts,
        seconds,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
        use_activation=asked.use_activation,
        pooling=asked.pooling,
    )


def _head(kind: str, model: ServedModel) -> dict[str, Any]:
    return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}


def _usage(found: Sequence[Any]) -> dict[str, int]:
    count = sum(len(each.prompt_token_ids) for each in found)
    return {"prompt_tokens": count, "total_tokens": count}


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
