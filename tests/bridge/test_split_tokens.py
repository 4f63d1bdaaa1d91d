"""Calls whose results have no operand of their name: experts and routers split over tokens, indexers refuse to."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jattn import ops
from jattn.bridge import typed_errors
from tests.bridge.test_partition import assert_close, each_kind, each_way, opaque, run_opaque
from tests.support.devices import collectives, mesh, on_four_devices, place
from torch_core.base.errors import Unsupported
from torch_core.experts.call import ExpertsCall
from torch_core.experts.routing_call import RouteCall
from torch_core.latent.sparse_call import ChoiceCall, IndexerCall
from torch_core.launch.call import Call
from torch_core.rowwise.call import RowQuantizeCall

WHOLE, ROWS = PartitionSpec(), PartitionSpec("dp")


def call_of(name: str) -> Call[Any]:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(8, 16)).astype(np.float32)
    if name == "route_experts":
        return RouteCall(hidden_states=rows, kernel=rng.normal(size=(16, 4)).astype(np.float32), top_k=2)
    if name == "row_quantize":
        return RowQuantizeCall(x=rows)
    if name == "fused_experts":
        return ExpertsCall(
            hidden_states=rows,
            topk_weights=rng.random((8, 2)).astype(np.float32),
            topk_ids=rng.permuted(np.tile(np.arange(4, dtype=np.int32), (8, 1)), axis=1)[:, :2].copy(),
            gate_up_kernel=rng.normal(size=(4, 16, 24)).astype(np.float32),
            down_kernel=rng.normal(size=(4, 12, 16)).astype(np.float32),
        )
    tables, starts = np.arange(1, 9, dtype=np.int32).reshape(8, 1), np.arange(9, dtype=np.int32)
    if name == "chosen_slots":
        chosen = np.zeros((8, 2), np.int32) + np.array([0, -1], np.int32)
        return ChoiceCall(topk_indices=chosen, block_tables=tables, query_start_loc=starts, block_size=4)
    return IndexerCall(
        query=rng.normal(size=(8, 2, 16)).astype(np.float32),
        weights=rng.random((8, 2)).astype(np.float32),
        key_cache=rng.normal(size=(9, 4, 16)).astype(np.float32),
        block_tables=tables,
        seq_lens=np.full(8, 3, np.int32),
        query_start_loc=starts,
        scale=0.25,
        max_query_len=1,
    )


def run(call: Call[Any], name: str) -> dict[str, jax.Array]:
    return run_opaque(call, name) if name == "opaque" else ops.run(call, name)


def placed(call: Call[Any], on: jax.sharding.Mesh, **specs: PartitionSpec) -> Call[jax.Array]:
    return call.with_arrays({key: place(x, on, specs.get(key, WHOLE)) for key, x in call.arrays().items()})


@pytest.mark.parametrize("call_name", ["fused_experts", "route_experts"])
@each_way
@on_four_devices
def test_each_device_computes_its_own_tokens_without_a_collective(kind: str, name: str, call_name: str) -> None:
    call = call_of(call_name)
    expected = ops.run(call.with_arrays({key: jax.numpy.asarray(x) for key, x in call.arrays().items()}), "xla")
    rows = {key: ROWS for key in call.arrays() if key in ("hidden_states", "topk_weights", "topk_ids")}
    given = placed(call, mesh(kind, dp=4), **rows)

    program = jax.jit(lambda call: run(call, name))
    if (kind, name) != ("auto", "xla"):
        # Along Auto axes plain jnp is XLA's to split.
        assert collectives(program, given) == []
    for key, found in program(given).items():
        assert found.sharding.spec[0] == "dp"
        assert_close(found, expected[key])


@pytest.mark.parametrize(
    "call_name", ["fused_experts", "route_experts", "chosen_slots", "indexer_logits", "row_quantize"]
)
@each_kind
@on_four_devices
def test_what_is_whole_stays_whole(kind: str, call_name: str) -> None:
    call = call_of(call_name)
    expected = ops.run(call.with_arrays({key: jax.numpy.asarray(x) for key, x in call.arrays().items()}), "xla")
    for key, found in jax.jit(opaque)(placed(call, mesh(kind, dp=4))).items():
        assert_close(found, expected[key])


@pytest.mark.parametrize("call_name", ["chosen_slots", "indexer_logits"])
@each_kind
@on_four_devices
def test_an_indexers_tokens_are_not_split(kind: str, call_name: str) -> None:
    call = call_of(call_name)
    rows = dict.fromkeys(("query", "weights", "topk_indices", "block_tables", "seq_lens"), ROWS)
    given = placed(call, mesh(kind, dp=4), **{key: spec for key, spec in rows.items() if key in call.arrays()})

    with (
        pytest.raises(Unsupported, match=rf"^{call.name}: sequences are split .*this op's are not cut"),
        typed_errors(),
    ):
        jax.block_until_ready(jax.jit(opaque)(given))


@each_kind
@on_four_devices
def test_an_indexer_of_blocks_on_several_devices_is_refused(kind: str) -> None:
    call = call_of("indexer_logits")
    call = call.with_arrays(
        {"key_cache": np.concatenate([call.arrays()["key_cache"], np.zeros((3, 4, 16), np.float32)])}
    )
    given = placed(call, mesh(kind, dp=4), key_cache=ROWS)

    with pytest.raises(Unsupported, match="key_cache by dp; this op's are not cut"), typed_errors():
        jax.block_until_ready(jax.jit(opaque)(given))
