"""The engine's records for `logging`: events with fields that a JSON formatter can write directly."""

from __future__ import annotations

import logging
from typing import Any

LOGGER = logging.getLogger("jattn")


def event(level: int, name: str, **fields: Any) -> None:
    """Logs an event: a line of text, and `record.event` and each field as attributes of the record.

    Args:
        level: level of the `logging` module.
        name: name of the event.
        **fields: strings, numbers, None, and lists of them.
    """
    if LOGGER.isEnabledFor(level):
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        LOGGER.log(level, "%s: %s", name, text, extra={"event": name, **fields}, stacklevel=2)
