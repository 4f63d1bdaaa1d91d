"""The torch side of the cross-check: transformers if it is installed, otherwise jattn's decoder, and its greedy run."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from jattn.llm.load.config import family_of
from jattn.llm.load.folder import read_config
from jattn.llm.models import ModelConfig
from jattn.llm.testing.torch_decoder import TorchDecoder
from torch_core.base.errors import Unsupported

# Below this many parameters a second OpenMP thread brings less to a decode step than waiting for it costs: with 1.8M
# parameters on two busy cores a step took 90 ms of processor time with two threads and 6 ms with one.
_ONE_THREAD_BELOW = 50_000_000


@dataclass(frozen=True, slots=True)
class TorchSide:
    """A model on torch and how to name it in a report.

    `forward(token_ids, past, source)` returns logits[tokens, vocab_size] and the past, which is None at the start;
    `source` is the input of an encoder, empty without one. `hidden_states` returns [tokens, hidden_size] after the
    embedding, each layer but the last, and the last norm. It is None if the model does not give them.
    """

    name: str
    description: str
    forward: Callable[[Sequence[int], Any, Sequence[int]], tuple[torch.Tensor, Any]]
    hidden_states: Callable[[Sequence[int], Sequence[int]], list[np.ndarray]] | None = None
    encoder_states: Callable[[Sequence[int]], list[np.ndarray]] | None = None


class FirstOfEqual(TorchFunctionMode):
    """Within it `Tensor.topk` takes the first of equal values, as jax.lax.top_k does; torch says nothing of which.

    Many of an indexer's scores are 0, so that otherwise torch itself chooses other tokens in float64 than in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        return _first_topk(*args, **(kwargs or {})) if func is torch.Tensor.topk else func(*args, **(kwargs or {}))


def _first_topk(values: torch.Tensor, k: int, dim: int = -1, **_: Any) -> Any:
    ordered, indices = values.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((ordered.narrow(dim, 0, k), indices.narrow(dim, 0, k)))  # type: ignore[attr-defined]


def load_torch_side(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: str,
    device: str,
    widened: bool = False,
    hf_overrides: Mapping[str, Any] | None = None,
    gguf: Path | None = None,
) -> TorchSide:
    """Loads the folder with transformers, or, on the CPU, with `TorchDecoder` if transformers cannot be imported.

    With `widened`, weights are rounded to `dtype` and the computation is in float64. Unsupported if neither serves it.
    transformers loads the GGUF file that the folder was written from, if it is given and transformers reads it.
    """
    torch_dtype = getattr(torch, dtype)
    try:
        with _quiet():
            import transformers
            from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
            from transformers.utils import logging
    except (ImportError, RuntimeError) as error:
        reason = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported: {error}"
        description = f"jattn.llm.testing.TorchDecoder, torch {torch.__version__} on cpu (transformers {reason})"
        if not TorchDecoder.serves(config):
            compared = f"{config.architecture} is compared with transformers"
            raise Unsupported(f"{compared}, which {reason}; pip install jattn[crosscheck].") from None
        compute_dtype = torch.float64 if widened else torch_dtype
        dtypes = {"weight_dtype": torch_dtype, "compute_dtype": compute_dtype}
        decoder = TorchDecoder(folder, **dtypes, hf_overrides=hf_overrides)
        return TorchSide("TorchDecoder", description, lambda token_ids, past, _: decoder(token_ids, past))
    # Its other ways to attend leave soft caps and sinks out, and those through experts have no float64. The eager one
    # of transformers 5 adds Falcon's ALiBi twice.
    attend = "sdpa" if config.architecture == "FalconForCausalLM" else "eager"
    options: dict[str, Any] = {} if TorchDecoder.serves(config) else {"attn_implementation": attend}
    options |= {} if config.moe is None else {"experts_implementation": "eager"}
    if hf_overrides:
        own = AutoConfig.from_pretrained(folder, local_files_only=True)
        options["config"] = type(own).from_dict(read_config(folder, hf_overrides))
    with _quiet(), _without_progress_bar(logging):
        kind = AutoModelForCausalLM if config.encoder is None else AutoModelForSeq2SeqLM
        reads_gguf = gguf is not None and not hf_overrides and _transformers_reads_gguf(config)
        options |= {"gguf_file": gguf.name} if gguf is not None and reads_gguf else {"use_safetensors": True}
        origin = gguf.parent if gguf is not None and reads_gguf else folder
        model: Any = kind.from_pretrained(origin, dtype=torch_dtype, local_files_only=True, **options)
        model.to(device).eval()
        if widened:
            model.double()

    description = f"transformers {transformers.__version__} {type(model).__name__}, torch {torch.__version__}"
    if gguf is not None:
        description += ", which reads the same file" if reads_gguf else ", from the weights that jattn read"
    return _of_transformers(model, config, f"{description} on {device}", device)


def _transformers_reads_gguf(config: ModelConfig) -> bool:
    """Whether transformers reads all of a GGUF file: it leaves out scalings of rotary embeddings."""
    if None in map(importlib.util.find_spec, ("gguf", "accelerate")) or config.rope_scaling is not None:
        return False
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return family_of(config).model_type.removesuffix("_text") in GGUF_SUPPORTED_ARCHITECTURES


def _of_transformers(model: Any, config: ModelConfig, description: str, device: str) -> TorchSide:
    context = _quiet if config.index_head_dim is None else _quiet_first_of_equal

    def ids(token_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(token_ids)], device=device)

    @torch.no_grad()
    def run(token_ids: Sequence[int], source: Sequence[int], **options: Any) -> Any:
        with context():
            if source:
                return model(input_ids=ids(source), decoder_input_ids=ids(token_ids), **options)
            return model(ids(token_ids), **options)

    def forward(token_ids: Sequence[int], past: Any, source: Sequence[int]) -> tuple[torch.Tensor, Any]:
        output = run(token_ids, source, past_key_values=past, use_cache=True)
        return output.logits[0], output.past_key_values

    def hidden_states(token_ids: Sequence[int], source: Sequence[int]) -> list[np.ndarray]:
        output = run(token_ids, source, use_cache=False, output_hidden_states=True)
        return _float64(output.decoder_hidden_states if source else output.hidden_states)

    @torch.no_grad()
    def encoder_states(token_ids: Sequence[int]) -> list[np.ndarray]:
        with context():
            return _float64(model.get_encoder()(ids(token_ids), output_hidden_states=True).hidden_states)

    of_encoder = None if config.encoder is None else encoder_states
    return TorchSide("transformers", description, forward, hidden_states, of_encoder)


def _float64(states: Sequence[torch.Tensor]) -> list[np.ndarray]:
    return [state[0].double().cpu().numpy() for state in states]


def logits_of(side: TorchSide, tokens: Sequence[int], source: Sequence[int]) -> np.ndarray:
    """Returns the logits after each token of a sequence in one call: float[tokens, vocab_size], at least float32."""
    logits = side.forward(tokens, None, source)[0].cpu()
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).numpy()


def greedy_run(
    side: TorchSide, prompt: Sequence[int], source: Sequence[int], max_tokens: int
) -> tuple[tuple[int, ...], np.ndarray]:
    """Generates greedily with torch's own cache, past any end-of-sequence token.

    Returns the new tokens, and the logits after each token of the prompt and of all new tokens but the last,
    float32[len(prompt) + max_tokens - 1, vocab_size].
    """
    tokens: list[int] = []
    pieces = []
    new, past = list(prompt), None
    for _ in range(max_tokens):
        logits, past = side.forward(new, past, source)
        pieces.append(logits.float().cpu().numpy())
        new = [int(pieces[-1][-1].argmax())]
        tokens += new
    return tuple(tokens), np.concatenate(pieces)


@contextlib.contextmanager
def suitable_threads(num_parameters: int) -> Iterator[None]:
    """Lets torch use one thread within the block if the model is small; its thread count is restored after."""
    before = torch.get_num_threads()
    if num_parameters < _ONE_THREAD_BELOW:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides the warnings of transformers' own modules; everything else stays as it was."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(transformers|huggingface_hub)(\.|$)")
        yield


@contextlib.contextmanager
def _quiet_first_of_equal() -> Iterator[None]:
    with _quiet(), FirstOfEqual():
        yield


@contextlib.contextmanager
def _without_progress_bar(logging: Any) -> Iterator[None]:
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
