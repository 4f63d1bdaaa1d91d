"""Names of model folders, checked before anything heavy is imported."""

from __future__ import annotations

import os
import re

from torch_core.base.errors import InvalidInput

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_exists(path: str) -> None:
    """Refuses a path that does not exist, if it cannot be the name of a model of the Hugging Face hub."""
    if not is_hub_name(path) and not os.path.exists(path):
        raise missing(path)


def is_hub_name(name: str) -> bool:
    """Returns whether a name has the form `org/name`."""
    return _HUB_NAME.fullmatch(name) is not None


def missing(path: str, reason: str = "") -> InvalidInput:
    """Returns the error for a folder that does not exist."""
    return InvalidInput("folder", f"is {path!r}", f"it is not an existing folder{reason}")
