"""Names of model folders and files, checked before anything heavy is imported."""

from __future__ import annotations

import os
import re

from torch_core.base.errors import InvalidInput

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_exists(path: str) -> None:
    """Refuses a path that does not exist, if it cannot be the name of a model of the Hugging Face hub."""
    if (is_gguf(path) or not is_hub_name(path)) and not os.path.exists(path):
        raise missing(path)


def named_path(given: str, argument: str = "model") -> tuple[str, str]:
    """Returns the name and the path of `NAME=PATH`."""
    name, sign, path = given.partition("=")
    if not sign or not name or not path:
        raise InvalidInput(argument, f"is {given!r}", "it must be NAME=PATH, such as small=models/small")
    return name, path


def is_hub_name(name: str) -> bool:
    """Returns whether a name has the form `org/name`."""
    return _HUB_NAME.fullmatch(name) is not None


def is_gguf(model: object) -> bool:
    """Returns whether this is the path of a GGUF file, by its name."""
    return isinstance(model, str | os.PathLike) and str(os.fspath(model)).lower().endswith(".gguf")


def missing(path: str, reason: str = "") -> InvalidInput:
    """Returns the error for a folder, or a GGUF file, that does not exist."""
    kind = "file" if is_gguf(path) else "folder"
    return InvalidInput(kind, f"is {path!r}", f"it is not an existing {kind}{reason}")
