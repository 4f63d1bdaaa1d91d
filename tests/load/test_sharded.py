"""Model folders that are read straight to a mesh: the parts of the whole model, and no more of the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jattn.llm.load import load_model, save_model
from jattn.llm.models import MoEConfig, shard_model
from tests.support.devices import mesh, on_four_devices
from tests.support.tiny_models import write_tiny_model

EXPERTS = {"architecture": "Qwen3MoeForCausalLM", "qk_norm": "head", "tie_word_embeddings": False}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.mark.parametrize("kind", ["fused products", "experts"])
@on_four_devices
def test_parts_are_read_as_a_whole_model_is_cut(kind: str, folder: str) -> None:
    changes: dict[str, Any] = {}
    if kind == "experts":
        changes = EXPERTS | {"moe": MoEConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=24)}
    over = mesh("auto", tp=4)
    write_tiny_model(Path(folder), seed=1, **changes)

    cut, _, _ = load_model(folder, mesh=over)
    expected = nnx.state(shard_model(load_model(folder)[0], over))

    for (path, found), (_, wanted) in zip(nnx.to_flat_state(nnx.state(cut)), nnx.to_flat_state(expected), strict=True):
        assert found[...].sharding == wanted[...].sharding, path
        np.testing.assert_array_equal(found[...], wanted[...], err_msg=str(path))


CUT: dict[str, dict[str, Any]] = {
    "fused products": {},
    "biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "experts": EXPERTS | {"moe": MoEConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=24)},
}


@pytest.mark.parametrize("kind", CUT)
@on_four_devices
def test_a_model_that_is_cut_is_saved_whole(kind: str, folder: str) -> None:
    whole, cut = Path(folder) / "whole", Path(folder) / "cut"
    write_tiny_model(whole, seed=1, **CUT[kind])

    model, config, _ = load_model(whole, mesh=mesh("auto", tp=4))
    save_model(cut, model, config)

    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
