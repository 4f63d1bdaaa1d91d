"""compare_bits: generation against the training pass, bit by bit, and the first layer and operation that differ."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.llm.engine import LLM, EngineConfig, SamplingParams, Verification
from jattn.llm.load import embedded_model_folder, load_model
from jattn.llm.load.source import open_source
from jattn.llm.models import Decoder, set_batch_invariant
from jattn.llm.testing.paged import PagedRun
from jattn.llm.testing.prompts import prompt_tokens
from jattn.table import aligned
from torch_core.base.checks import check_int
from torch_core.base.errors import Unsupported

# The operations of a layer that take rows of its width.
_OF_ROWS = ("input_layernorm", "self_attn.qkv_proj", "post_attention_layernorm", "mlp", "moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBits:
    """The hidden states after one part of the model, by one path, against the training pass.

    Attributes:
        path: "prefill" or "decode".
        part: "embedding", "layer 0" and so on, or "norm".
        num_values: compared numbers.
        num_differing: those that are not equal.
    """

    path: str
    part: str
    num_values: int
    num_differing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsReport:
    """The result of `compare_bits`; `str()` gives its text.

    Attributes:
        model: the model's name.
        dtype: its dtype.
        verification: log-probabilities of generated tokens, against the training pass.
        parts: the parts of the model in order.
        operation: the first operation that differs within the first layer that does; None if none does.
    """

    model: str
    dtype: str
    verification: Verification
    parts: tuple[PartBits, ...]
    operation: str | None

    @property
    def first_difference(self) -> str | None:
        """The first part that differs, with its path and operation; None if none does."""
        first = next((part for part in self.parts if part.num_differing), None)
        if first is None:
            return None
        return f"{first.path}: {first.part}" + (f", {self.operation}" if self.operation else "")

    @property
    def passed(self) -> bool:
        """Whether no bit differs."""
        return self.verification.passed and self.first_difference is None

    def to_json(self) -> str:
        """Returns one JSON object."""
        facts = {"passed": self.passed, "first_difference": self.first_difference}
        return json.dumps({**asdict(self), **facts}, indent=1)

    def __str__(self) -> str:
        lines = [("path", "part", "values", "differing")]
        lines += [(row.path, row.part, f"{row.num_values:,}", f"{row.num_differing:,}") for row in self.parts]
        first = self.first_difference
        text = [f"{self.model}, {self.dtype}, on {jax.default_backend()}", *aligned(lines), str(self.verification)]
        text += [] if first is None else [f"first difference: {first}"]
        return "\n".join([*text, f"digest {self.verification.digest}", "passed" if self.passed else "FAILED"])


def compare_bits(
    model: str | os.PathLike[str] | Decoder | None = None,
    prompts: Sequence[str | Sequence[int]] | None = None,
    *,
    max_tokens: int = 32,
    batch_invariant: bool = True,
    **loading: Any,
) -> BitsReport:
    """Compares generation with the training pass of the same model, bit by bit.

    An engine generates for all prompts at once; `forward_dense` then recomputes the log-probabilities of its tokens.
    The hidden states after each layer are compared too, of prompts and of tokens that are decoded one by one.

    Args:
        model: a folder, a GGUF file, a Decoder, which is switched, or None for the embedded model.
        prompts: texts or lists of token ids; a few of unequal length if None.
        max_tokens: number of sampled tokens for each prompt.
        batch_invariant: False compares the default arithmetic, which differs.
        **loading: options of `jattn.llm.load.load_model`, for a folder.

    Raises:
        InvalidInput: as `compare_with_torch`.
        Unsupported: a module of the model is not batch-invariant; or the model is an encoder, or has one.
    """
    check_int("max_tokens", max_tokens, 1)
    decoder, tokenizer, name = _loaded(model, loading)
    config = decoder.config
    if config.is_encoder or config.encoder is not None:
        raise Unsupported(f"{name} has an encoder; decoders alone are batch-invariant.")
    if batch_invariant:
        set_batch_invariant(decoder)
    tokens = prompt_tokens(prompts, config, tokenizer, max_tokens)
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=0, logprobs=0, ignore_eos=True)
    sizes = EngineConfig(max_model_len=max(map(len, tokens)) + max_tokens, batch_invariant=batch_invariant)
    with LLM(decoder, config=sizes) as llm:
        outputs = llm.generate([list(each) for each in tokens], params)
        verification = llm.verify(outputs, params)
    texts = [(*prompt, *output.outputs[0].token_ids) for prompt, output in zip(tokens, outputs, strict=True)]
    expected = [_dense_states(decoder, text) for text in texts]
    run, parts = PagedRun(decoder, texts), []
    for path, lens in (("prefill", None), ("decode", [1] * len(texts))):
        found = run.hidden_states(lens)
        parts += _parts(path, found, expected)
    first = next((index for index, part in enumerate(parts) if part.num_differing), None)
    operation = None if first is None else _operation(decoder, expected[0], first % len(expected[0]))
    return BitsReport(
        model=name, dtype=config.dtype, verification=verification, parts=tuple(parts), operation=operation
    )


def _loaded(model: Any, loading: dict[str, Any]) -> tuple[Decoder, Any, str]:
    if isinstance(model, Decoder):
        return model, None, "Decoder"
    source = open_source(embedded_model_folder() if model is None else model)
    decoder, _, tokenizer = load_model(source.path, with_tokenizer=source.has_tokenizer, **loading)
    return decoder, tokenizer, "embedded model" if model is None else source.path.name


def _dense_states(decoder: Decoder, text: Sequence[int]) -> np.ndarray:
    graph, state = nnx.split(decoder)
    return np.asarray(_states(state, jnp.asarray([text], jnp.int32), graph=graph))


@functools.partial(jax.jit, static_argnames="graph")
def _states(state: Any, tokens: jax.Array, *, graph: Any) -> jax.Array:
    return jnp.concatenate(list(nnx.merge(graph, state).hidden_states(tokens)), axis=0).astype(jnp.float32)


def _parts(path: str, found: list[np.ndarray], expected: list[np.ndarray]) -> list[PartBits]:
    count = len(expected[0])
    names = ["embedding", *(f"layer {index}" for index in range(count - 2)), "norm"]
    return [
        PartBits(
            path=path,
            part=name,
            num_values=sum(each[index].size for each in expected),
            num_differing=sum(int((a[index] != b[index]).sum()) for a, b in zip(found, expected, strict=True)),
        )
        for index, name in enumerate(names)
    ]


def _operation(decoder: Decoder, states: np.ndarray, part: int) -> str | None:
    """Returns the operation of a layer whose rows depend on the number of rows; attention if no other one's do."""
    if not 1 <= part <= len(decoder.layers):
        return None
    layer: Any = decoder.layers[part - 1]
    rows = jnp.asarray(states[part - 1], jnp.dtype(decoder.config.dtype))
    for name in _OF_ROWS:
        module = functools.reduce(lambda module, attribute: getattr(module, attribute, None), name.split("."), layer)
        if module is not None:
            graph, state = nnx.split(module)
            whole = _applied(state, rows, graph=graph)
            if (whole[-1:] != _applied(state, rows[-1:], graph=graph)).any():
                return name
    return "attention"


@functools.partial(jax.jit, static_argnames="graph")
def _applied(state: Any, rows: jax.Array, *, graph: Any) -> jax.Array:
    return nnx.merge(graph, state)(rows)
