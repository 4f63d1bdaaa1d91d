"""Vectors of texts: batches of like lengths through a model's dense forward pass, one program for each padded shape."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.llm.load import SentenceModules
from jattn.llm.models import Decoder
from jattn.llm.models.decoder import unit_length
from torch_core.base.checks import check_bool
from torch_core.base.errors import InvalidInput, RequestTooLong, Unsupported

# Most rows of a batch, and most tokens of one including padding: they fill a device without using much memory.
_MOST_ROWS, _MOST_TOKENS = 64, 1 << 14
_SHORTEST = 16


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """One vector: float32[hidden_size]."""

    embedding: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingRequestOutput:
    """A prompt's number, its vector and its tokens; names are vLLM's."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: tuple[int, ...]


def embed(
    model: object,
    prompts: Sequence[Sequence[int]],
    *,
    pooling: str | None,
    normalize: bool,
    modules: SentenceModules | None = None,
) -> list[EmbeddingRequestOutput]:
    """Returns the vector of each prompt of token ids; pooling and normalize as in `Decoder.embed`.

    The model is a `Decoder`: an encoder, or a decoder whose last hidden states are pooled. `modules` are those of its
    folder, whose pooling is used if none is given.
    """
    model = checked_model(model)
    check_bool("normalize", normalize)
    modules = SentenceModules() if modules is None else modules
    if modules.unserved:
        wanted = "without them its vectors would be others"
        raise Unsupported("modules.json", f"of the model's folder has {', '.join(modules.unserved)}", wanted)
    _check_dense(modules, model)
    pooling = (modules.pooling or "mean") if pooling is None else pooling
    if not isinstance(pooling, str):
        raise InvalidInput("pooling", value=pooling, wanted="use 'mean', 'cls' or 'last'")
    checked = [_checked(index, prompt, model) for index, prompt in enumerate(prompts)]
    graph, state = nnx.split(model)
    layers = tuple((layer.kernel, layer.bias) for layer in modules.dense)
    options: dict[str, Any] = {"pooling": pooling, "normalize": normalize}
    options["activations"] = tuple(layer.activation for layer in modules.dense)
    found: dict[int, np.ndarray] = {}
    for places, tokens, lengths in batches(checked, model.config.max_position_embeddings):
        vectors = _embed(graph, state, tokens, lengths, layers, **options)
        found |= dict(zip(places, np.asarray(vectors), strict=False))
    return [
        EmbeddingRequestOutput(str(index), EmbeddingOutput(found[index]), tuple(prompt))
        for index, prompt in enumerate(checked)
    ]


def checked_model(model: object) -> Decoder:
    """Returns a model that gives vectors; refuses others."""
    if not isinstance(model, Decoder) or model.config.encoder is not None:
        raise Unsupported(f"model is a {type(model).__name__}; vectors come from encoders and from decoders alone.")
    if model.parallel is not None:
        raise Unsupported(
            f"model is cut over {model.parallel.size} devices; vectors come from a whole one: leave "
            "tensor_parallel_size at 1, or give each copy a device of its own (data_parallel_size)."
        )
    return model


def batches(prompts: Sequence[Sequence[int]], longest: int) -> Iterator[tuple[Sequence[int], np.ndarray, np.ndarray]]:
    """Yields places of prompts, their tokens int32[rows, tokens] and lengths int32[rows], padded to powers of two."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    while order:
        width = min(max(_power_of_two(len(prompts[order[-1]])), _SHORTEST), longest)
        count = min(len(order), _MOST_ROWS, max(_MOST_TOKENS // width, 1))
        places, order = order[-count:], order[:-count]
        rows = _power_of_two(count)
        # Padding rows hold one token, so that none is empty.
        tokens, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
        for row, place in enumerate(places):
            lengths[row] = len(prompts[place])
            tokens[row, : lengths[row]] = prompts[place]
        yield places, tokens, lengths


def shortened(vectors: Sequence[np.ndarray], dimensions: int, *, normalize: bool) -> list[np.ndarray]:
    """Returns the first elements of float32[hidden_size] vectors, of length 1 with `normalize`.

    It is the use of Matryoshka representations (Kusupati et al. 2022).

    Raises:
        InvalidInput: the vectors have fewer elements.
    """
    size = min(map(len, vectors), default=dimensions)
    if dimensions > size:
        raise InvalidInput("dimensions", value=dimensions, wanted=f"the model's vectors have {size} elements")
    found = [each[:dimensions] for each in vectors]
    tiny = np.finfo(np.float32).tiny
    return [each / max(np.linalg.norm(each), tiny) for each in found] if normalize else found


def _check_dense(modules: SentenceModules, model: Decoder) -> None:
    size = model.config.hidden_size
    for index, layer in enumerate(modules.dense):
        inputs, outputs = layer.kernel.shape
        if inputs != size:
            raise InvalidInput(f"modules.dense[{index}]", f"has {inputs} inputs", f"the vectors have {size} elements")
        size = outputs


def _checked(index: int, prompt: Sequence[int], model: Decoder) -> list[int]:
    if not isinstance(prompt, Sequence | np.ndarray):
        raise InvalidInput(f"prompts[{index}]", value=prompt, wanted="it must be a list of token ids")
    tokens = list(prompt)
    longest, vocab_size = model.config.max_position_embeddings, model.config.vocab_size
    if not tokens:
        raise InvalidInput(f"prompts[{index}]", "is empty", "it needs at least one token")
    if len(tokens) > longest:
        raise RequestTooLong(f"prompts[{index}]", f"has {len(tokens)} tokens", f"the model reads {longest} at most")
    for place, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
            raise InvalidInput(f"prompts[{index}][{place}]", value=token, wanted=f"token ids are 0 to {vocab_size - 1}")
    return [int(token) for token in tokens]


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


@functools.partial(jax.jit, static_argnums=0, static_argnames=("pooling", "normalize", "activations"))
def _embed(
    graph: Any,
    state: Any,
    tokens: Any,
    lengths: Any,
    layers: Any,
    *,
    pooling: str,
    normalize: bool,
    activations: tuple[str, ...],
) -> jax.Array:
    vectors = nnx.merge(graph, state).embed(tokens, lengths, pooling=pooling, normalize=False)
    for (kernel, bias), activation in zip(layers, activations, strict=True):
        vectors = vectors @ kernel if bias is None else vectors @ kernel + bias[None]
        vectors = jnp.tanh(vectors) if activation == "tanh" else vectors
    return unit_length(vectors) if normalize else vectors
