"""verify: the log-probabilities of a run's tokens against those of the training pass, bit by bit."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jattn.llm.engine.device.sampler import VocabShards
from jattn.llm.engine.device.weights import Structure
from jattn.llm.engine.request.outputs import RequestOutput
from jattn.ops import token_logprobs
from torch_core.base.errors import InvalidInput, Unsupported

_SMALLEST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The comparison of a run's log-probabilities with those of the training pass.

    Attributes:
        num_values: compared log-probabilities.
        num_differing: those that are not equal bit by bit.
        largest_difference: largest absolute difference.
        first_difference: the first that differs, as (request, sample, token) by index; None if none does.
        digest: SHA-256 of the run's log-probabilities and tokens: two runs with the same one have equal bits.
    """

    num_values: int
    num_differing: int
    largest_difference: float
    first_difference: tuple[int, int, int] | None
    digest: str

    @property
    def passed(self) -> bool:
        """Whether all bits are equal."""
        return self.num_differing == 0

    def __str__(self) -> str:
        found = f"{self.num_differing} of {self.num_values} log-probabilities differ from the training pass"
        if self.first_difference is None:
            return found
        request, sample, token = self.first_difference
        where = f"first at request {request}, sample {sample}, token {token}"
        return f"{found}, by up to {self.largest_difference:.1e}, {where}"


def verify(
    model: Any, outputs: Sequence[RequestOutput], *, logprobs_mode: str, temperatures: Sequence[float]
) -> Verification:
    """Recomputes the log-probabilities of outputs by one training pass over each whole text.

    Args:
        model: a Decoder, with the weights that generated.
        outputs: finished requests with log-probabilities.
        logprobs_mode: that of the engine.
        temperatures: of each request.

    Raises:
        InvalidInput: an output has no log-probabilities.
        Unsupported: the model has no `forward_dense`, or the engine reports logits.
    """
    if not hasattr(model, "forward_dense"):
        raise Unsupported(f"model is a {type(model).__name__} without forward_dense, the training pass of a Decoder.")
    if not logprobs_mode.endswith("logprobs"):
        raise Unsupported("logprobs_mode", value=logprobs_mode, wanted="log-probabilities are verified")
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    structure, digest = Structure(graph, treedef), hashlib.sha256()
    parallel = getattr(model, "parallel", None)
    specs = tuple(leaf.sharding.spec for leaf in leaves) if parallel else None
    mesh = leaves[0].sharding.mesh if parallel else None
    count, differing, largest, first = 0, 0, 0.0, None
    for place, tokens, start, found, temperature in _samples(outputs, temperatures):
        # At 0 the engine takes the likeliest token, and reports log-probabilities of the logits as they are.
        divisor = temperature if logprobs_mode.startswith("processed") and temperature > 0 else 1.0
        width = max(_SMALLEST, 1 << (len(tokens) - 1).bit_length())
        padded = np.pad(np.asarray(tokens, np.int32), (0, width - len(tokens)))
        options = {"structure": structure, "mesh": mesh, "specs": specs}
        known = np.asarray(_scores(leaves, padded[None], np.float32(divisor), **options))[0]
        expected = known[start - 1 : len(tokens) - 1]
        unequal = np.flatnonzero(found.view(np.int32) != expected.view(np.int32))
        if unequal.size and first is None:
            first = (*place, int(unequal[0]))
        count, differing = count + len(found), differing + len(unequal)
        largest = max(largest, float(np.abs(found - expected).max(initial=0.0)))
        digest.update(np.asarray(tokens, np.int32).tobytes() + found.tobytes())
    return Verification(
        num_values=count,
        num_differing=differing,
        largest_difference=largest,
        first_difference=first,
        digest=digest.hexdigest(),
    )


def _samples(
    outputs: Sequence[RequestOutput], temperatures: Sequence[float]
) -> Iterator[tuple[tuple[int, int], tuple[int, ...], int, np.ndarray, float]]:
    """Yields for each sample its place, the tokens of its text, the first new one, their values and the temperature."""
    for index, (output, temperature) in enumerate(zip(outputs, temperatures, strict=True)):
        prompt = tuple(output.prompt_token_ids)
        for sample, completion in enumerate(output.outputs):
            if completion.logprobs is None:
                wanted = "ask for them: SamplingParams(logprobs=0)"
                raise InvalidInput(f"outputs[{index}].outputs[{sample}]", "has no logprobs", wanted)
            chosen = zip(completion.logprobs, completion.token_ids, strict=False)
            values = np.array([known[token].logprob for known, token in chosen], np.float32)
            tokens = completion.token_ids[: len(values)]
            if len(tokens):
                yield (index, sample), (*prompt, *tokens), len(prompt), values, temperature


@functools.partial(jax.jit, static_argnames=("structure", "mesh", "specs"))
def _scores(
    leaves: list[jax.Array],
    tokens: jax.Array,
    temperature: jax.Array,
    *,
    structure: Structure,
    mesh: Mesh | None,
    specs: tuple[PartitionSpec, ...] | None,
) -> jax.Array:
    def scored(leaves: list[jax.Array], tokens: jax.Array, temperature: jax.Array) -> jax.Array:
        model = structure.merge(leaves)
        logits = model.forward_dense(tokens)[:, :-1]
        parallel = getattr(model, "parallel", None)
        if parallel is not None and parallel.parts("vocab") > 1:
            logits = VocabShards(parallel.axis, model.config.vocab_size, logits.shape[-1]).gathered(logits)
        options = {"temperature": temperature, "batch_invariant": getattr(model, "batch_invariant", False)}
        return token_logprobs(logits, tokens[:, 1:], **options)

    if mesh is not None:
        whole = PartitionSpec()
        scored = jax.shard_map(
            scored, mesh=mesh, in_specs=(list(specs or ()), whole, whole), out_specs=whole, check_vma=False
        )
    return scored(leaves, tokens, temperature)
