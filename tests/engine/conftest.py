"""A model small enough to compile in a second, shared by the engine's tests."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest
from flax import nnx

from jattn.llm.models import Decoder, ModelConfig


def tiny_decoder(**changes: Any) -> Decoder:
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    implementation = changes.pop("implementation", "torch")
    return Decoder(ModelConfig(**{**sizes, **changes}), rngs=nnx.Rngs(0), implementation=implementation)


def greedy_kind() -> str:
    """What the programs are called that decode greedy rows: a GPU has them beside those that can draw, too."""
    return "plain" if jax.default_backend() == "cpu" else "greedy"


@functools.cache
def alternating_decoder(*windows: int | None) -> Decoder:
    """A decoder whose layers have these windows."""
    return tiny_decoder(num_hidden_layers=len(windows), layer_windows=windows)


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    return tiny_decoder()
