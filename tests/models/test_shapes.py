"""Shapes of a model's parameters, from its config: those of the model that is built."""

from __future__ import annotations

import pytest
from flax import nnx

from jattn.llm.load import parse_config
from jattn.llm.load.folder import read_config
from jattn.llm.models import MoEConfig
from jattn.llm.models.encoder_decoder import build_model
from jattn.llm.models.shapes import parameter_shapes
from tests.load.test_families import ALIKE
from tests.support import encoder_decoders, family_models
from tests.support.tiny_models import tiny_config

LAST = [
    pytest.param(
        *(support, architecture, len(variants) - 1),
        id=architecture,
        marks=pytest.mark.nightly if architecture.startswith(ALIKE) else [],
    )
    for support in (family_models, encoder_decoders)
    for architecture, (_, variants) in support.CASES.items()
]


@pytest.mark.parametrize(("support", "architecture", "variant"), LAST)
def test_the_shapes_of_every_family_are_those_of_the_whole_model(support, architecture, variant, tmp_path, seed):
    pytest.importorskip("transformers")
    support.write_checkpoint(tmp_path, architecture, variant, seed)
    config = parse_config(read_config(tmp_path))

    whole = nnx.state(nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0))))
    assert parameter_shapes(config) == {tuple(path): leaf.shape for path, leaf in nnx.to_flat_state(whole)}


def test_layers_of_two_kinds_have_shapes_of_their_own():
    moe = MoEConfig(num_experts=3, num_experts_per_tok=2, intermediate_size=8, dense_layers=(1,))
    shapes = parameter_shapes(tiny_config(num_hidden_layers=3, moe=moe))
    assert ("layers", 1, "mlp", "down_proj", "kernel") in shapes
    assert [path for path in shapes if path[:3] == ("layers", 1, "moe")] == []
    assert shapes["layers", 0, "moe", "router", "kernel"] == shapes["layers", 2, "moe", "router", "kernel"]
