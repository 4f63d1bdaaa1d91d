"""Sums over the devices of one process by a kernel of jattn, which XLA captures in a step's CUDA graph.

XLA ends a command buffer at each of its own collectives, so a step with two sums a layer is launched piece by piece,
and each device waits in every sum for the other's late launch. These sums are ordinary launches.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jattn.bridge.calls import array_spec
from jattn.bridge.native import call_operation, why_not
from jattn.ops import rowwise
from jattn.ops.softmax import wide_dtype


@dataclass(frozen=True, slots=True)
class Peers:
    """The memory of a mesh axis's devices for sums of small arrays; each device writes to all of it.

    The table holds addresses, and the object holds the memory: keep it as long as a program with the table may run.

    Attributes:
        table: int32[devices * words], split over the axis: addresses of the other devices' memory. Pass each device its
            part in `jax.shard_map`.
    """

    table: jax.Array
    _workspace: jax.Array = field(repr=False)

    @classmethod
    def of(cls, mesh: Mesh, axis_name: str) -> Peers | None:
        """Allocates it; returns None unless the devices are CUDA devices of this process that see each other's memory.

        Args:
            mesh: the devices.
            axis_name: the only axis of the mesh with more than one device.
        """
        devices = list(mesh.devices.ravel())
        world = mesh.shape[axis_name]
        if world < 2 or len(devices) != world or why_not() is not None or not _see_each_other(devices):
            return None
        # Needs triton, which the native bridge has found.
        from torch_core.all_reduce.plan import peers_size, workspace_words

        split = NamedSharding(mesh, PartitionSpec(axis_name))
        workspace = jax.device_put(np.zeros(world * workspace_words(world), np.int32), split)
        # No device may send before all have zeros.
        jax.block_until_ready(workspace)
        shards = {shard.device: shard.data.unsafe_buffer_pointer() for shard in workspace.addressable_shards}
        addresses = [shards[device] for device in devices]
        rows = np.asarray([[rank, own, *addresses] for rank, own in enumerate(addresses)], np.uint64)
        table = jax.device_put(rows.view(np.int32).reshape(world * peers_size(world)), split)
        return cls(table, workspace)


def all_reduce(x: jax.Array, axis_name: str, peers: jax.Array | None = None) -> jax.Array:
    """Returns the sum over a mesh axis, inside `jax.shard_map`: up to 8 MB by a kernel, of more by `psum`.

    A kernel adds in float32 in the order of devices and rounds once, so that all have the same bits. It has no
    derivative. The sums and exchanges of a program must depend on each other: two at once would use the same memory.

    Args:
        x: this device's part.
        axis_name: the mesh axis.
        peers: this device's part of `Peers.table`; None for `psum` always.
    """
    if peers is not None:
        # Needs triton, which the table's constructor has already found.
        from torch_core.all_reduce.plan import plan_all_reduce, sums

        spec, world = array_spec(x), jax.lax.axis_size(axis_name)
        if sums(spec, world):
            return call_operation(plan_all_reduce(spec, world), {"x": x, "peers": peers})["out"]
    return jax.lax.psum(x, axis_name)


def sum_in_order(x: jax.Array, axis_name: str) -> jax.Array:
    """Returns the same sum by a gather: added in float32 in the order of devices and rounded once, in every program.

    A row's bits do not depend on the number of rows, as those of `psum` may. Its derivative is that of `psum`.

    Args:
        x: this device's part, `[..., features]`.
        axis_name: the mesh axis.
    """

    @jax.custom_jvp
    def total(x: jax.Array) -> jax.Array:
        return rowwise(added, *jax.lax.all_gather(x, axis_name))

    def added(*parts: jax.Array) -> jax.Array:
        wide = [part.astype(wide_dtype(x.dtype)) for part in parts]
        return functools.reduce(jnp.add, wide).astype(x.dtype)

    @total.defjvp
    def _derive(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return total(*primals), jax.lax.psum(tangents[0], axis_name)

    return total(x)


def all_reduce_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    axis_name: str,
    peers: jax.Array,
    *,
    epsilon: float,
    round_first: bool = False,
    add_one: bool = False,
) -> tuple[jax.Array, jax.Array] | None:
    """Returns residual + the sum of x over a mesh axis, and its root mean square norm, in one launch.

    Inside `jax.shard_map`, of up to 8 MB of rows of 16-bit elements; None for operands that no kernel takes. The first
    result has the bits of `residual + all_reduce(x, ...)`. Nothing has a derivative. For the required dependencies see
    `all_reduce`.

    Args:
        x: this device's part, [..., width].
        residual: array of the same shape and dtype, the same on all devices.
        weight: [width], of the same dtype.
        axis_name: the mesh axis.
        peers: this device's part of `Peers.table`.
        epsilon: added to the mean square of a row.
        round_first: also round the norm before it is multiplied by the weight.
        add_one: multiply by 1 + weight.
    """
    from torch_core.all_reduce.plan import plan_all_reduce_norm, sums_and_norms

    specs, world = (array_spec(x), array_spec(weight)), jax.lax.axis_size(axis_name)
    if residual.dtype != x.dtype or not sums_and_norms(*specs, world):
        return None
    plan = plan_all_reduce_norm(*specs, world, epsilon=epsilon, round_first=round_first, add_one=add_one)
    found = call_operation(plan, {"x": x, "residual": residual, "weight": weight, "peers": peers})
    return found["out"], found["normed"]


def exchange(x: jax.Array, axis_name: str, peers: jax.Array | None = None) -> jax.Array:
    """Returns `[devices, ...]`, the part of every device of a mesh axis for this one; inside `jax.shard_map`.

    Small parts are moved by a kernel, others by `all_gather` or `all_to_all`.

    Args:
        x: `[devices, ...]`, a part for each, or `[1, ...]`, one for all.
        axis_name: the mesh axis.
        peers: as in `all_reduce`.
    """
    world = jax.lax.axis_size(axis_name)
    num_bytes = x[0].size * x.dtype.itemsize
    if peers is not None and x.dtype.itemsize in (2, 4):
        from torch_core.all_reduce.plan import exchanges, plan_exchange

        if exchanges(num_bytes, world):
            words = x.reshape(len(x), -1, *(() if x.dtype.itemsize == 4 else (2,)))
            words = jax.lax.bitcast_convert_type(words, jnp.int32)
            plan = plan_exchange(array_spec(words), world)
            found = call_operation(plan, {"x": words, "peers": peers})["out"]
            return jax.lax.bitcast_convert_type(found, x.dtype).reshape(world, *x.shape[1:])
    if len(x) == 1:
        return jax.lax.all_gather(x[0], axis_name)
    return jax.lax.all_to_all(x, axis_name, 0, 0)


def merge_attention(
    out: jax.Array,
    lse: jax.Array,
    axis_name: str,
    peers: jax.Array,
    *,
    sinks: jax.Array | None,
    num_heads: int,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array] | None:
    """Returns `merge_over_axis` of a few rows in one launch; None for operands that the kernel does not take.

    All devices have the same bits. Nothing has a derivative. For the required dependencies see `all_reduce`.

    Args:
        out, lse, axis_name, sinks, out_dtype: as in `jattn.parallel.merge_over_axis`.
        peers: this device's part of `Peers.table`.
        num_heads: heads of the result: those of `out`, or, if devices split them, of one device.
    """
    from torch_core.all_reduce.plan import merges, plan_merge

    spec, world = array_spec(out), jax.lax.axis_size(axis_name)
    if lse.dtype != jnp.float32 or not merges(spec, num_heads, world):
        return None
    given = {"x": out, "x_lse": lse, "peers": peers, **({} if sinks is None else {"sinks": jnp.asarray(sinks)})}
    dtype = spec.dtype if out.dtype == out_dtype else "float32"
    plan = plan_merge(spec, array_spec(given["sinks"]) if "sinks" in given else None, num_heads, dtype, world)
    found = call_operation(plan, given)
    return found["out"].astype(out_dtype), found["lse"]


def _see_each_other(devices: list[Any]) -> bool:
    # Not by their platform, "gpu", which AMD's have too.
    try:
        own = jax.local_devices(backend="cuda")
    except RuntimeError:
        return False
    if any(device not in own for device in devices):
        return False
    can_access = ctypes.CDLL("libcuda.so.1").cuDeviceCanAccessPeer
    answer = ctypes.c_int(0)
    for one, other in itertools.permutations(devices, 2):
        if can_access(ctypes.byref(answer), one.local_hardware_id, other.local_hardware_id) or not answer.value:
            return False
    return True
