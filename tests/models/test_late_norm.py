"""Norms that divide after the product: the logits of a single row, and where they are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jattn.llm.models import decoder_layer
from jattn.llm.models.late_norm import LateNorm
from jattn.llm.models.mixers import MambaConfig
from tests.models.test_decoder_paged import assert_close, random_tokens
from tests.support.tiny_models import PagedRun, dense_logits, tiny_config, tiny_model

MAMBA = MambaConfig(num_heads=4, head_dim=6, state_size=6, num_groups=2)
#: No other test traces a decoder of this vocabulary.
SIZES: dict[str, Any] = {"vocab_size": 263, "num_hidden_layers": 2}
FALCON: dict[str, Any] = {"layer_types": ("attention_mamba",) * 2, "mamba": MAMBA, "mlp_multipliers": (0.5, 2.0)}


@pytest.mark.parametrize("options", [{}, FALCON], ids=["attention", "attention and a state"])
def test_a_row_alone_has_the_logits_of_the_dense_forward(options, seed, monkeypatch):
    model = tiny_model(tiny_config(**SIZES, **options), seed)
    (tokens,) = random_tokens(seed, 7)
    late, call = [], LateNorm.__call__
    monkeypatch.setattr(decoder_layer, "launches_kernels", lambda implementation: True)
    monkeypatch.setattr(LateNorm, "__call__", lambda norm, x: late.append(x.shape) or call(norm, x))
    run = PagedRun(model, num_seqs=1)

    found = [run.step([tokens[at : at + 1]], num_tokens=1)[0] for at in range(len(tokens))]

    assert_close(np.concatenate(found), dense_logits(model, tokens))
    # Those before the first layer, in and after it, and in the last one.
    assert late == [(1, 48)] * 4


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_placement": "both"},
        {"norm_type": "layer_norm"},
        {"norm_type": "gemma_rms_norm"},
        {"parallel_block": "shared_norm"},
        {"attention_bias": True},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_other_norms_and_products_divide_first(changes, seed, monkeypatch):
    plain = tiny_model(tiny_config(), seed).layers[0]
    assert not isinstance(plain.input_norm(is_row=True), LateNorm), "a CPU launches no kernels"
    monkeypatch.setattr(decoder_layer, "launches_kernels", lambda implementation: True)
    assert isinstance(plain.input_norm(is_row=True), LateNorm)
    assert not isinstance(plain.input_norm(quantizes=True), LateNorm)
    model = tiny_model(tiny_config(**changes), seed)
    assert not any(isinstance(layer.input_norm(is_row=True), LateNorm) for layer in model.layers)
