"""generation_config.json: how the makers of a model want it to be sampled, and which tokens begin and end a text."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from jattn.load.folder import check_folder, member, read_object
from jattn.models.rope_scaling import check_number
from torch_core.checks import check_int, shown
from torch_core.errors import InvalidInput

__all__ = ["GenerationDefaults", "load_generation_defaults", "token_ids"]

_NAME = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What generation_config.json asks for; None where it says nothing. Names are those of `SamplingParams`.

    Attributes:
        temperature: 0 where the file says not to sample.
        top_k: keep so many of the likeliest tokens; 0 for all.
        top_p: keep the likeliest tokens up to this mass.
        max_tokens: new tokens at most.
        bos_token_id: the token that starts a document.
        eos_token_ids: the tokens that end a generation.
        decoder_start_token_id: the token that a decoder behind an encoder starts with.
        forced_bos_token_id: the one that always follows it.

    Raises:
        InvalidInput: a value out of range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    decoder_start_token_id: int | None = None
    forced_bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("temperature", 0.0, 1e3), ("top_p", 1e-9, 1.0)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), low, high)
        for name, low in (("top_k", 0), ("max_tokens", 1)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low, (1 << 31) - 1)

    @property
    def sampling(self) -> dict[str, Any]:
        """What was said about sampling, by keyword of `SamplingParams`."""
        named = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "max_tokens")}
        return {name: value for name, value in named.items() if value is not None}


def load_generation_defaults(folder: str | os.PathLike[str]) -> GenerationDefaults:
    """Reads generation_config.json of a model folder; everything is None without one. Other keys are not looked at.

    Raises:
        InvalidInput: the file is broken or a value is out of range.
    """
    path = check_folder(folder)
    if member(path, _NAME) is None:
        return GenerationDefaults()
    raw = read_object(path, _NAME)
    values: dict[str, Any] = {"temperature": 0.0} if raw.get("do_sample") is False else {}
    same = ("top_k", "top_p", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id")
    keys = {"max_new_tokens": "max_tokens"} | {name: name for name in same}
    if raw.get("do_sample") is not False:
        keys["temperature"] = "temperature"
    try:
        if raw.get("eos_token_id") is not None:
            values["eos_token_ids"] = token_ids(raw["eos_token_id"], "eos_token_id")
        return GenerationDefaults(**values, **{name: raw.get(key) for key, name in keys.items()})
    except InvalidInput as error:
        raise InvalidInput(f"{_NAME}: {error}") from None


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Returns an id, a list of ids or null as a tuple; ranges are ModelConfig's to check.

    Raises:
        InvalidInput: anything else.
    """
    values = [] if value is None else value if isinstance(value, list) else [value]
    if len(values) > 64 or any(isinstance(token, bool) or not isinstance(token, int) for token in values):
        raise InvalidInput(f"{name} is {shown(value)}; it must be a token id, a list of at most 64, or null.")
    return tuple(values)
