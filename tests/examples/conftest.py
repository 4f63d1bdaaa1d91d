"""Programs are compiled in less time here: results are compared within a tolerance, or with what runs so too."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quickly(quick_compile: None) -> None:
    pass
