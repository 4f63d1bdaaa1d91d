"""Programs are compiled in less time here: what they take is nobody's bar."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quickly(quick_compile: None) -> None:
    pass
