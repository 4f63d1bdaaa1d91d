"""What the modules' tests share: programs that are compiled in less time, values being compared within a tolerance."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quickly(quick_compile: None) -> None:
    pass
