"""The architectures that are read and written, each as data."""

from __future__ import annotations

from jattn.llm.load.families.family import Family, Key, every
from jattn.llm.load.families.registry import known_families, register_family

__all__ = ["Family", "Key", "every", "known_families", "register_family"]
