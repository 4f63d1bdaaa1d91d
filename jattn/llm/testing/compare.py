"""compare_with_torch: the same weights and prompts through jattn's paged path and through torch."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import torch
from flax import nnx

from jattn.llm.load import TextTokenizer, embedded_model_folder, load_model, parse_config, save_model
from jattn.llm.load.folder import check_folder, read_config
from jattn.llm.load.source import open_source
from jattn.llm.models import Decoder, EncoderDecoder, ModelConfig, num_parameters
from jattn.llm.paths import is_gguf
from jattn.llm.testing.measure import Truth, compare_tokens, layer_rows, measure
from jattn.llm.testing.paged import PagedRun, encoder_states, engine_tokens, with_implementation
from jattn.llm.testing.prompts import prompt_tokens
from jattn.llm.testing.report import CrosscheckReport, CrosscheckRow, LayerRow, torch_limit
from jattn.llm.testing.torch_decoder import TorchDecoder
from jattn.llm.testing.torch_side import TorchSide, greedy_run, load_torch_side, logits_of, suitable_threads
from jattn.ops import IMPLEMENTATIONS, available_implementations
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, Unsupported

#: A sequence, and the input of the encoder, empty without one.
_Fed: TypeAlias = tuple[Sequence[int], Sequence[int]]
_States: TypeAlias = tuple[list[list[np.ndarray]], list[list[np.ndarray]]]
#: Sequences that show torch's error, in addition to the prompts' own, and their length in tokens.
NUM_PROBES, PROBE_LEN = 4, 32


def compare_with_torch(
    model: str | os.PathLike[str] | Decoder | None = None,
    prompts: Sequence[str | Sequence[int]] | None = None,
    *,
    torch_model: str | os.PathLike[str] | None = None,
    implementations: Sequence[str] | None = None,
    max_tokens: int = 32,
    dtype: str | None = None,
    quantization: str | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    torch_device: str = "cpu",
    layers: bool = False,
) -> CrosscheckReport:
    """Runs the same weights and prompts through jattn and torch and compares logits and greedy tokens.

    torch (transformers if it is installed, `TorchDecoder` otherwise) generates greedily. jattn then computes the
    logits of every position of the same tokens through its paged cache, once by prefill and once by decode steps, with
    each implementation; and `LLM` generates on its own with the first of them. A float64 run (of `TorchDecoder`, or of
    transformers for families that it does not serve) says how much of a difference is rounding: jattn passes if its
    error is at most 2 x (torch's own error + eps) and every greedy token is torch's, or ties with it. Torch's error is
    the largest of several runs, because one is noise: the generation, the same tokens in one call, and random ones.

    float32 products are computed in full float32 on both sides; on CUDA, JAX would use TF32 by default.

    Args:
        model: a Hugging Face folder, a GGUF file (which transformers reads too, if it can), a `Decoder` (its weights
            are written to a temporary folder for torch), or None for the embedded model.
        prompts: texts or lists of token ids; a few of unequal length if None.
        torch_model: the folder that torch loads, if it is not `model`: use it to check that weights in memory, or
            converted weights, equal those of a checkpoint.
        implementations: implementations of jattn's attention ops; all that run here if None.
        max_tokens: number of greedy tokens for each prompt.
        dtype: dtype of weights and computation on both sides; float32 for a folder if None. A `Decoder` has its own.
        quantization: quantised weights of jattn's side; see `jattn.llm.load.load_model`. Torch's side has numbers of
            `dtype`, so that what "fp8" rounds away shows as an error.
        hf_overrides: values that replace those of config.json on both sides; see there. Neither is for a `Decoder`.
        torch_device: device of transformers.
        layers: also compare the output of every layer, so that the report names the first one that differs.

    Raises:
        InvalidInput: there are no prompts, an empty prompt, a token outside the vocabulary, an unknown implementation,
            an option of loading for a Decoder, or a folder that cannot be loaded.
        RequestTooLong: a prompt and its new tokens exceed the model's context.
        Unsupported: a named implementation cannot run here, or transformers is needed and not installed.

    Example:
        >>> report = compare_with_torch("path/to/folder", ["Hello"])  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
        >>> report.passed  # doctest: +SKIP
        True
    """
    check_int("max_tokens", max_tokens, 1)
    chosen, skipped = _choose(implementations)
    with contextlib.ExitStack() as stack:
        subject = stack.enter_context(_subject(model, dtype, quantization, hf_overrides))
        if subject.decoder.config.is_encoder:
            raise Unsupported(f"{subject.name} is an encoder; logits and greedy tokens are compared.")
        tokens = prompt_tokens(prompts, subject.decoder.config, subject.tokenizer, max_tokens)
        if subject.decoder.config.encoder is None:
            subject = replace(subject, decoder=_as_long(subject.decoder, max(map(len, tokens)) + max_tokens))
        torch_folder = subject.folder if torch_model is None else check_folder(torch_model)
        config = subject.decoder.config
        torch_config = parse_config(read_config(torch_folder, hf_overrides))
        if torch_config.vocab_size != config.vocab_size:
            problem = f"has vocab_size {torch_config.vocab_size} and the model {config.vocab_size}"
            raise InvalidInput("torch_model", problem, "the two cannot be compared")
        shared: dict[str, Any] = {"dtype": config.dtype, "hf_overrides": hf_overrides}
        gguf = None if torch_model else subject.gguf
        side = load_torch_side(torch_folder, torch_config, device=torch_device, gguf=gguf, **shared)
        exact_side = None
        if layers or not TorchDecoder.serves(torch_config):
            exact_side = load_torch_side(torch_folder, torch_config, device="cpu", widened=True, gguf=gguf, **shared)
        stack.enter_context(suitable_threads(num_parameters(config)))
        # With an encoder, prompts are its inputs, and the generation begins with one token.
        inputs = tokens if config.encoder is not None else []
        sources = inputs or [()] * len(tokens)
        prompts_fed = [(config.decoder_start_token_id or 0,) for _ in inputs] or tokens
        fed = zip(prompts_fed, sources, strict=True)
        torch_runs = [greedy_run(side, prompt, source, max_tokens) for prompt, source in fed]
        # The last new token is never fed, so a sequence has one position less than it has tokens.
        sequences = [(*prompt, *new[:-1]) for prompt, (new, _) in zip(prompts_fed, torch_runs, strict=True)]
        probes = [] if inputs else _probes(torch_config, sequences)
        whole = list(zip([*sequences, *probes], [*sources, *(() for _ in probes)], strict=True))
        exact, truth_name = _exact_logits(torch_folder, torch_config, whole, exact_side, **shared)
        again = ((true, logits_of(side, *each)) for true, each in zip(exact, whole, strict=True))
        eps = torch.finfo(getattr(torch, config.dtype)).eps
        truth = Truth.of(exact[: len(sequences)], [logits for _, logits in torch_runs], again, eps=eps)
        states: list[_States] = []
        if layers and exact_side is not None:
            states = [_states_of(each, whole) for each in (side, exact_side)]
    expected = [new for new, _ in torch_runs]
    prompt_lens = [len(prompt) for prompt in prompts_fed]
    rows: list[CrosscheckRow] = []
    behind: list[LayerRow] = []
    with _full_precision(config.dtype):
        for implementation in chosen:
            decoder = with_implementation(subject.decoder, implementation)
            if not rows:
                # How requests are scheduled and blocks are allocated does not depend on the implementation.
                found = engine_tokens(decoder, tokens, max_tokens)
                difference, ties = compare_tokens(expected, found, truth, prompt_lens, free_running=True)
                facts = {"limit": truth.limit, "first_difference": difference, "ties": ties}
                rows.append(CrosscheckRow(implementation=implementation, path="engine", **facts))
            run = PagedRun(decoder, sequences, inputs)
            rows += _logits_rows(implementation, run, prompt_lens, sequences, expected, truth)
            if states:
                if isinstance(decoder, EncoderDecoder):
                    encoders = (encoder for _, encoder in states)
                    found = encoder_states(decoder, inputs)
                    behind += layer_rows(implementation, found, *encoders, eps=eps, prefix="encoder.")
                behind += layer_rows(implementation, run.hidden_states(), *(each for each, _ in states), eps=eps)
    return CrosscheckReport(
        model=subject.name,
        dtype=config.dtype,
        prompt_lens=tuple(map(len, tokens)),
        max_tokens=max_tokens,
        jax_side=f"jax {jax.__version__} on {jax.default_backend()}, through the paged cache",
        torch_side=side.description,
        torch_name=side.name,
        torch_error=truth.torch_error,
        torch_limit=torch_limit(eps, rows),
        limit=truth.limit,
        rows=tuple(rows),
        skipped=skipped,
        truth=truth_name,
        layers=tuple(behind),
    )


@dataclass(frozen=True, slots=True)
class _Subject:
    """The model under test, and the folder of its weights, which were written there if it is of a GGUF file."""

    decoder: Decoder
    tokenizer: TextTokenizer | None
    folder: Path
    name: str
    gguf: Path | None = None


def _as_long(decoder: Decoder, longest: int) -> Decoder:
    """Returns the decoder for sequences up to `longest`: with "longrope", transformers looks at how long they are."""
    scaling = decoder.config.rope_scaling
    if scaling is None or scaling.rope_type != "longrope" or longest > scaling.original_max_position_embeddings:
        return decoder
    config = replace(decoder.config, max_position_embeddings=scaling.original_max_position_embeddings)
    return nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))), nnx.state(decoder))


def _probes(config: ModelConfig, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns random sequences in place of the long ones that are too few to show torch's error.

    Torch multiplies few rows by other kernels than many, which round a third as much; jattn pads to many.
    """
    scaling = config.rope_scaling
    lengths = (PROBE_LEN, config.max_position_embeddings, scaling and scaling.original_max_position_embeddings)
    length = min(each for each in lengths if each)
    count = max(NUM_PROBES - sum(len(each) >= length for each in sequences), 0)
    return np.random.default_rng(0).integers(config.vocab_size, size=(count, length)).tolist()


def _exact_logits(
    folder: Path, config: ModelConfig, whole: Sequence[_Fed], side: TorchSide | None, *, dtype: str, hf_overrides: Any
) -> tuple[list[np.ndarray], str]:
    """Returns float64 logits of every position and the name of their decoder: jattn's if it serves the model."""
    if TorchDecoder.serves(config):
        dtypes = {"weight_dtype": getattr(torch, dtype), "compute_dtype": torch.float64}
        decoder = TorchDecoder(folder, **dtypes, hf_overrides=hf_overrides)
        return [decoder(sequence)[0].numpy() for sequence, _ in whole], "jattn.llm.testing.TorchDecoder in float64"
    if side is None:
        raise Unsupported(f"{config.architecture} is compared with transformers, and no model of it is given.")
    return [logits_of(side, *each) for each in whole], "transformers in float64"


def _states_of(side: TorchSide, whole: Sequence[_Fed]) -> _States:
    """Returns the hidden states of each sequence, and those of the encoder for each input."""
    if side.hidden_states is None:
        raise Unsupported(f"layers are compared with transformers, and torch's side is {side.description}.")
    found = [side.hidden_states(tokens, source) for tokens, source in whole]
    return found, [] if side.encoder_states is None else [side.encoder_states(source) for _, source in whole]


@contextlib.contextmanager
def _subject(
    model: str | os.PathLike[str] | Decoder | None,
    dtype: str | None,
    quantization: str | None,
    hf_overrides: Mapping[str, Any] | None,
) -> Iterator[_Subject]:
    if isinstance(model, Decoder):
        config = model.config
        if dtype is not None and dtype != config.dtype:
            raise InvalidInput("dtype", f"is {dtype!r} and the Decoder's is {config.dtype!r}", "leave dtype out")
        for name, option in (("quantization", quantization), ("hf_overrides", hf_overrides)):
            if option is not None:
                raise InvalidInput(name, value=option, wanted="a Decoder is already loaded")
        with tempfile.TemporaryDirectory(prefix="jattn-") as folder:
            save_model(folder, model, config)
            yield _Subject(model, None, Path(folder), f"Decoder ({num_parameters(config):,} parameters)")
        return
    source = open_source(embedded_model_folder() if model is None else model)
    load = functools.partial(load_model, source.path, dtype=dtype or "float32", hf_overrides=hf_overrides)
    decoder, config, tokenizer = load(with_tokenizer=source.has_tokenizer, quantization=quantization)
    name = "embedded model" if model is None else source.path.name
    name = f"{name} ({num_parameters(config):,} parameters)"
    if not is_gguf(source.path):
        yield _Subject(decoder, tokenizer, source.path, name)
        return
    with tempfile.TemporaryDirectory(prefix="jattn-") as folder:
        save_model(folder, decoder if quantization is None else load(with_tokenizer=False)[0], config)
        yield _Subject(decoder, tokenizer, Path(folder), name, source.path)


def _choose(implementations: Sequence[str] | None) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    reasons = available_implementations()
    if implementations is None:
        skipped = tuple((name, reason) for name, reason in reasons.items() if reason is not None)
        return tuple(name for name, reason in reasons.items() if reason is None), skipped
    chosen = (implementations,) if isinstance(implementations, str) else tuple(dict.fromkeys(implementations))
    if not chosen:
        raise InvalidInput("implementations", "is empty", f"name some of {', '.join(map(repr, IMPLEMENTATIONS))}")
    for name in chosen:
        if name not in reasons:
            raise InvalidInput("implementations", f"has {name!r}", f"use {', '.join(map(repr, IMPLEMENTATIONS))}")
        if reasons[name] is not None:
            raise Unsupported(f"implementation {name!r} cannot run here: {reasons[name]}")
    return chosen, ()


def _logits_rows(
    implementation: str,
    run: PagedRun,
    prompt_lens: Sequence[int],
    sequences: Sequence[Sequence[int]],
    expected: Sequence[tuple[int, ...]],
    truth: Truth,
) -> Iterator[CrosscheckRow]:
    for path, prefill_lens in (("prefill", [len(sequence) for sequence in sequences]), ("decode", prompt_lens)):
        logits = run.logits(prefill_lens)
        found = [each[length - 1 :].argmax(-1).tolist() for each, length in zip(logits, prompt_lens, strict=True)]
        difference, ties = compare_tokens(expected, found, truth, prompt_lens, free_running=False)
        facts = {**asdict(measure(logits, truth)), "first_difference": difference, "ties": ties}
        yield CrosscheckRow(implementation=implementation, path=path, limit=truth.limit, **facts)


def _full_precision(dtype: str) -> contextlib.AbstractContextManager[None]:
    # On a CPU it would change nothing but the programs, which would not be those of generation any more.
    wanted = dtype == "float32" and jax.default_backend() != "cpu"
    return jax.default_matmul_precision("highest") if wanted else contextlib.nullcontext()
