"""`/v1/embeddings`: OpenAI's requests and answers, over `LLM.embed`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jattn.llm.serve.fields import Fields, RequestError, is_prompt
from jattn.llm.text.prompts import Prompt
from torch_core.base.checks import shown

__all__ = ["EmbeddingsRequest", "embeddings_body", "parse_embeddings"]

# OpenAI's limit.
_MAX_INPUTS = 2048
_POOLINGS = ("mean", "cls", "last")


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """The body of `/v1/embeddings`.

    Attributes:
        model: as the client names it.
        prompts: texts or token ids.
        as_base64: vectors are bytes of float32, little-endian, in base64; numbers otherwise.
        pooling, normalize: of `LLM.embed`.
    """

    model: str | None
    prompts: list[Prompt]
    as_base64: bool
    pooling: str
    normalize: bool


def parse_embeddings(body: Mapping[str, Any]) -> EmbeddingsRequest:
    """Reads the body of `/v1/embeddings`.

    Raises:
        RequestError: a field is missing, unknown or wrong.
    """
    fields = Fields(body)
    model = fields.text("model")
    given = fields.take("input", is_prompt, "a string, token ids, or a list of either")
    encoding = fields.take(
        "encoding_format", lambda value: value in ("float", "base64"), '"float" or "base64"; others are not served'
    )
    pooling = fields.take("pooling", lambda value: value in _POOLINGS, f"one of {', '.join(_POOLINGS)}")
    normalize = fields.flag("normalize", default=True)
    if (dimensions := fields.number("dimensions", None)) is not None:
        raise RequestError(
            400, f"dimensions is {shown(dimensions)}; vectors have the model's own size: leave it out.",
            param="dimensions",
        )  # fmt: skip
    fields.finish()
    if given is None:
        raise RequestError(400, "input is missing.", param="input")
    prompts: list[Prompt] = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
    if len(prompts) > _MAX_INPUTS:
        raise RequestError(400, f"input has {len(prompts)} entries; it must have {_MAX_INPUTS} at most.", param="input")
    return EmbeddingsRequest(model, prompts, encoding == "base64", pooling or "mean", normalize)


def embeddings_body(
    request: EmbeddingsRequest, vectors: Sequence[np.ndarray], model: str, num_tokens: int
) -> dict[str, Any]:
    """Returns OpenAI's answer.

    Args:
        request: the request.
        vectors: float32[hidden_size] of each prompt.
        model: the name that is served.
        num_tokens: of all prompts.
    """
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(each) if request.as_base64 else each.tolist()}
        for index, each in enumerate(vectors)
    ]
    counts = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": counts}


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
