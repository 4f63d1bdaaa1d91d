"""What loading and saving hold on the host: the model, and little beside it."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

from jattn.llm.load import load_model, save_model
from jattn.llm.load.read_ahead import FileRange, read_ahead
from tests.support.tiny_models import tiny_config, tiny_model

# Of the embedding, in MiB: far more than the threads' buffers.
LARGEST = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    config = tiny_config(
        vocab_size=LARGEST << 10, hidden_size=256, intermediate_size=1024, num_hidden_layers=1, tie_word_embeddings=True
    )
    path = tmp_path_factory.mktemp("model")
    save_model(path, tiny_model(config, 0), config)
    return path


def peak_of(action: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the most MiB that were allocated beyond what was there before."""
    tracemalloc.start()
    try:
        result = action()
        return result, tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def test_loading_copies_each_weight_once_and_holds_half_of_the_largest_beside_the_model(folder) -> None:
    (model, *_), peak = peak_of(lambda: load_model(folder, with_tokenizer=False))

    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))) / 2**20
    assert peak - size < LARGEST / 2


def test_saving_holds_no_more_than_the_largest_tensor(folder, tmp_path) -> None:
    model, config, _ = load_model(folder, with_tokenizer=False)

    _, peak = peak_of(lambda: save_model(tmp_path, model, config))

    assert peak < 1.3 * LARGEST
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_files_are_read_in_the_order_of_their_use_and_an_unreadable_one_stops_nobody(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))

    found = read_ahead([[FileRange(path, 0, 60)], [], [FileRange(path, 60, 1 << 20)]])

    assert list(found) == [None, None, None]


def test_what_follows_a_tensor_larger_than_the_bound_is_read_while_it_is_used(tmp_path, monkeypatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    following = threading.Event()
    monkeypatch.setattr("jattn.llm.load.read_ahead._MOST_AHEAD", 10)
    monkeypatch.setattr(
        "jattn.llm.load.read_ahead._touch", lambda file, start, end: following.set() if start == 60 else None
    )

    found = read_ahead([[FileRange(path, 0, 60)], [FileRange(path, 60, 40)]])

    next(found)
    assert following.wait(30)
