"""Sums of small arrays over devices without a kernel: XLA's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jattn import parallel
from tests.support.devices import collectives, mesh, on_four_devices


@on_four_devices
def test_devices_without_cuda_have_no_memory_of_each_other_and_sum_by_psum() -> None:
    devices = mesh("auto")
    assert parallel.Peers.of(devices, "tp") is None

    split = PartitionSpec("tp")
    summed = jax.jit(
        jax.shard_map(lambda x: parallel.all_reduce(x, "tp"), mesh=devices, in_specs=split, out_specs=split)
    )
    x = jnp.arange(8.0)
    assert collectives(summed, x) == ["all-reduce"]
    np.testing.assert_array_equal(summed(x), np.tile(x.reshape(4, 2).sum(0), 4))
