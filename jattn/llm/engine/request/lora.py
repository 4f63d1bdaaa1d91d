"""The adapter of a request: how callers name one, and one that an engine has loaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from jattn.llm.models import AdapterTarget, LoraWeights
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import Limits, check_fields

_MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A low-rank adapter (LoRA) by its name and folder, with vLLM's fields.

    Attributes:
        lora_name: name of the adapter, by which it is known once it is loaded.
        lora_int_id: number of the adapter, for callers; 0 for none.
        lora_path: folder of PEFT with adapter_config.json and adapter_model.safetensors; "" for a loaded adapter.
        base_model_name: name of the base model, for callers.
        load_inplace: load the folder again if the name is known; requests that run keep the adapter that they have.

    Raises:
        InvalidInput: a value of the wrong type, or an empty or long name.
    """

    lora_name: str
    lora_int_id: Annotated[int, Limits(0)] = 0
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.lora_path, os.PathLike):
            object.__setattr__(self, "lora_path", os.fspath(self.lora_path))
        check_fields(self)
        check_lora_name(self.lora_name)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter of an engine. Another version of it is another object: requests keep theirs.

    Attributes:
        name: its name.
        version: a number that no other adapter of the engine ever has.
        rank: its rank.
        weights: matrices of each part that it changes, of `AdapterTarget.shapes`, of numpy or JAX.
        path: the folder, for reports; "" if it came from memory.
        pinned: versions that keep their slots, of all adapters of the engine.
    """

    name: str
    version: int
    rank: int
    weights: Mapping[AdapterTarget, LoraWeights]
    path: str = ""
    pinned: Container[int] = field(default=(), repr=False)

    @property
    def is_pinned(self) -> bool:
        """It keeps its slot when no request has it."""
        return self.version in self.pinned

    @property
    def key(self) -> bytes:
        """Its part of prefix keys."""
        return f"lora {self.version} {self.name}".encode()


def prefix_salt(salt: bytes | None, inputs: bytes = b"", adapter: LoadedAdapter | None = None) -> bytes | None:
    """Returns the salt of a request's prefix keys: with other inputs or another adapter, tokens have other keys."""
    own = inputs + (b"" if adapter is None else adapter.key)
    return hashlib.sha256(own + (b"" if salt is None else b"+" + salt)).digest() if own else salt


def check_lora_name(name: Any) -> None:
    """Raises InvalidInput for a value that is no name of an adapter."""
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
        wanted = f"it must be a string of 1 to {_MAX_NAME} printable characters"
        raise InvalidInput("lora_name", value=name, wanted=wanted)
