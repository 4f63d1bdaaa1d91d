"""Nightly: every family on four devices, along a trainer's axes and cut for an engine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from jattn.llm.engine import LLM, EngineConfig, SamplingParams
from jattn.llm.load import load_model
from jattn.llm.models import Decoder, partition_specs
from tests.support.devices import mesh, on_four_devices
from tests.support.family_models import CASES, VARIANTS, write_checkpoint

pytestmark = pytest.mark.nightly
#: Those whose layers have attention of several sizes run on four devices too, in every variant.
UNEQUAL = [name for name in CASES if name.startswith(("Gemma4", "Laguna", "MiMo"))]
CUT = [(name, 0, 2) for name in CASES]
CUT += [(*each, size) for each in VARIANTS for size in (2, 4) if each[0] in UNEQUAL and (*each, size) not in CUT]


def model_of(architecture: str, variant: int = 0) -> Decoder:
    with tempfile.TemporaryDirectory() as folder:
        # Training axes cut the vocabulary into equal parts.
        write_checkpoint(Path(folder), architecture, variant, 3, vocab_size=100)
        return load_model(Path(folder), dtype="float32", with_tokenizer=False)[0]


@pytest.mark.parametrize("architecture", list(CASES))
@on_four_devices
def test_a_family_has_the_same_logits_with_its_parameters_on_a_training_mesh(architecture: str) -> None:
    model, over = model_of(architecture), mesh("auto", fsdp=2, tp=2)
    graph, state = nnx.split(model)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 100, (2, 8)))
    expected = np.asarray(model.forward_dense(tokens))

    with jax.set_mesh(over):
        specs = partition_specs(model)
        placed = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(over, spec)), state, specs)
        found = np.asarray(jax.jit(lambda state: nnx.merge(graph, state).forward_dense(tokens))(placed))

    # The same sums in another order.
    assert np.abs(found - expected).max() <= 64 * 2.0**-23 * np.abs(expected).max()


@pytest.mark.parametrize(("architecture", "variant", "size"), CUT)
@on_four_devices
def test_a_family_says_the_same_on_several_devices(architecture: str, variant: int, size: int) -> None:
    sizes = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    model = model_of(architecture, variant)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def said(**options: Any) -> list[tuple[int, ...]]:
        with LLM(model, config=EngineConfig(**sizes, max_model_len=32, **options)) as llm:
            return [tuple(each.outputs[0].token_ids) for each in llm.generate([[5, 9, 2, 7], [3]], params)]

    assert said(tensor_parallel_size=size) == said()
