"""The settings of generation that a GGUF file recommends."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.generation import GenerationDefaults
from jattn.llm.load.gguf.metadata import Metadata
from jattn.llm.load.gguf.tokenizer import end_ids
from torch_core.base.errors import InvalidInput

#: Keys of the metadata, and the fields of `GenerationDefaults` that they set.
_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def generation_defaults_of_gguf(metadata: Metadata) -> GenerationDefaults:
    """Returns the values of general.sampling, and the special tokens.

    Raises:
        InvalidInput: a value out of range; the message names the key of the file.
    """
    given: dict[str, Any] = {field: metadata[key] for key, field in _KEYS.items() if key in metadata}
    ends = end_ids(metadata)
    try:
        return GenerationDefaults(
            **given, bos_token_id=metadata.number("tokenizer.ggml.bos_token_id"), eos_token_ids=ends or None
        )
    except InvalidInput as error:
        name = next((key for key, field in _KEYS.items() if field == error.argument), None)
        raise (error if name is None else error.renamed(name)) from None
