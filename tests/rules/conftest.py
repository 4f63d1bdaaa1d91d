"""What tests of rules share: the trees of all files, for as long as they run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.syntax import tree_of


@pytest.fixture(scope="package", autouse=True)
def trees() -> Iterator[None]:
    yield
    # Hundreds of megabytes.
    tree_of.cache_clear()
