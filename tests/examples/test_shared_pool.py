"""A torch model and a JAX model over one pool: same tokens, shared prefixes, nothing copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.shared_pool import SharedPool
from tests.support.tiny_models import write_tiny_model

PROMPTS = [list(range(20, 60)), [5, 6, 7], [*range(20, 52), 3]]
STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), 0, head_dim=32)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    return SharedPool(folder).generate(PROMPTS, STEPS, prefill="jax", decode="jax")[0]


@pytest.mark.parametrize(("prefill", "decode"), [("torch", "jax"), ("jax", "torch")])
def test_one_framework_prefills_and_the_other_decodes_over_the_same_blocks(folder, alone, prefill, decode) -> None:
    shared = SharedPool(folder)
    addresses = shared.pool.addresses()

    tokens, _ = shared.generate(PROMPTS, STEPS, prefill=prefill, decode=decode)

    assert tokens == alone
    assert shared.pool.addresses() == addresses


@pytest.mark.parametrize(("first", "second"), [("torch", "jax"), ("jax", "torch")])
def test_a_prefix_that_one_framework_computed_is_found_by_the_other(folder, alone, first, second) -> None:
    shared = SharedPool(folder)
    shared.generate(PROMPTS[:1], STEPS, prefill=first, decode=first)

    tokens, cached = shared.generate(PROMPTS, STEPS, prefill=second, decode=second)

    assert tokens == alone
    assert cached == [32, 0, 32]


def test_a_torch_view_is_the_pools_own_memory(folder) -> None:
    shared = SharedPool(folder)

    views = shared.pool.as_torch()

    assert tuple(view.data_ptr() for view in views) == shared.pool.addresses()
