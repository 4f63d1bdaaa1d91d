"""Every family on CUDA, through the kernels: the logits and the greedy tokens of transformers on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jattn.llm.load import load_model
from tests.load.test_families import LAST, assert_greedy_as_transformers, paged_logits
from tests.support.family_models import reference_logits, write_checkpoint
from tests.support.tiny_models import reference_bound

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    # XLA's float32 products on a GPU are rounded to 10 bits otherwise.
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize(("architecture", "variant"), LAST)
def test_prefill_in_chunks_and_decoding_give_the_logits_of_transformers(architecture, variant, tmp_path, seed) -> None:
    folder = write_checkpoint(tmp_path, architecture, variant, seed)
    tokens = np.random.default_rng(seed).integers(0, 99, 36)
    exact, same_dtype = reference_logits(folder, tokens[None])
    model, _, _ = load_model(folder, implementation="triton", with_tokenizer=False)
    found = paged_logits(model, tokens.astype(np.int32), (16, 25))
    assert np.abs(found - exact[0]).max() <= reference_bound(exact, same_dtype)


@pytest.mark.parametrize(("architecture", "variant"), LAST)
def test_the_engine_decodes_what_transformers_would(architecture, variant, tmp_path, seed) -> None:
    folder = write_checkpoint(tmp_path, architecture, variant, seed)
    assert_greedy_as_transformers(folder, seed, max_tokens=12, implementation="triton")
