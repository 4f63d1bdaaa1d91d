"""Eight devices: a step has the collectives of two, no more; docs/explanation/devices.md has the bytes."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jattn import parallel
from jattn.llm.engine import Engine, EngineConfig, SamplingParams
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import run
from tests.engine.test_tensor_parallel import COLLECTIVE
from tests.support.devices import collectives, on_eight_devices

pytestmark = pytest.mark.nightly

SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_scheduler_steps": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 8, "hidden_size": 32, "num_hidden_layers": 2}


def messages(engine: Engine) -> list[tuple[str, int]]:
    """The collectives of the decode step of four rows, with the elements of each result."""
    programs = engine._core.device.runner.programs
    (text,) = (
        compiled.as_text()
        for bucket, compiled in programs.compiled.items()
        if str(bucket).startswith("4 sequences, 4 ")
    )
    found = []
    for shape, kind in COLLECTIVE.findall(text):
        sizes = [np.prod([int(n) for n in each.split(",")]) for each in re.findall(r"\[([\d,]+)\]", shape)]
        found.append((kind, int(sum(sizes))))
    return found


@pytest.mark.parametrize("context_size", [1, 4])
@on_eight_devices
def test_a_layer_has_two_sums_and_what_spread_sequences_add(context_size: int) -> None:
    model = tiny_decoder(**HEADS, num_key_value_heads=8 if context_size == 1 else 2)
    config = EngineConfig(**SIZES, fixed_shapes=True, tensor_parallel_size=8, decode_context_parallel_size=context_size)
    engine = Engine(model, config)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    alone = Engine(model, EngineConfig(**SIZES, fixed_shapes=True))
    assert run(engine, prompts, greedy) == run(alone, prompts, greedy)

    found = messages(engine)
    kinds = Counter(kind for kind, _ in found)
    # The embedding and two of each layer, rows of hidden_size; and the largest logit of each row.
    sums = sorted(size for kind, size in found if kind == "all-reduce")
    assert sums == [4] + [4 * 32] * 5
    if context_size == 1:
        assert set(kinds) == {"all-reduce", "all-gather"}
        return
    # A group's queries, and each head's output with the two words of its lse, from each of a group to each.
    assert kinds["all-to-all"] == 2
    assert [size for kind, size in found if kind == "all-gather"].count(4 * 4 * 8) == 2


@on_eight_devices
def test_a_ring_of_eight_sends_keys_and_values_seven_times() -> None:
    mesh, tokens = Mesh(np.asarray(jax.devices(), object), ("cp",)), PartitionSpec(None, "cp")
    shapes = ((1, 64, 4, 8), (1, 64, 2, 8), (1, 64, 2, 8))
    given = [jnp.ones(shape, jnp.float32) for shape in shapes]
    ring = jax.shard_map(
        lambda q, k, v: parallel.ring_attention(q, k, v, "cp", max_gathered_bytes=0, implementation="torch"),
        mesh=mesh,
        in_specs=tokens,
        out_specs=tokens,
        check_vma=False,
    )
    assert collectives(jax.jit(ring), *given) == ["collective-permute"] * 14
