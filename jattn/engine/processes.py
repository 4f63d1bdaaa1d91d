"""One engine over the devices of several processes: the first schedules, the others do what it says.

Every process builds the same engine of the same model. What the first one does to the devices it announces before, and
the others do the same: XLA's collectives need every process to run every program. Announcements go through the
key-value store of JAX's coordination service, and not through a collective: that would wait in the devices' queues
behind the steps in flight, and an engine without requests would sit in one until it times out.
"""

from __future__ import annotations

import hashlib
import io
import json
import secrets
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import version
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jattn.engine.config import EngineConfig
from torch_core.checks import check_int, shown
from torch_core.errors import InvalidInput, Unsupported

__all__ = ["HEARTBEAT_SECONDS", "Announce", "Channel", "check_agreement", "check_together", "join", "shared_channel"]

Result = TypeVar("Result")

#: Of silence until JAX's coordination service takes a process for dead and ends the others.
HEARTBEAT_SECONDS = 20
# A message is deleted when so many others came after it. A step is a collective, so the others are never as far behind.
_KEPT = 64
# Of what processes agree on; a config has half as many.
_MOST_PARTS = 128
# The coordination service itself ends a process whose leader is gone; this long is waited for the next request at once.
_POLL_MILLISECONDS = 5_000


def join(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Makes this process one of several; call it before anything asks for a device.

    Args:
        coordinator: HOST:PORT of the first process; None, with the others, for what JAX detects (SLURM, Kubernetes,
            Open MPI).
        num_processes: of all.
        process_id: of this one, from 0.

    Raises:
        InvalidInput: an argument that is missing or out of range, or nothing to detect.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise InvalidInput(f"{missing[0]} is None; give {', '.join(given)} all, or none where JAX finds them itself.")
    if num_processes is not None:
        check_int("num_processes", num_processes, 1, 1 << 16)
        check_int("process_id", process_id, 0, num_processes - 1)
        if not isinstance(coordinator, str) or not coordinator.rpartition(":")[2].isdigit():
            raise InvalidInput(f"coordinator is {shown(coordinator)}; it must be HOST:PORT of the first process.")
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except ValueError as error:
        raise InvalidInput(
            f"the processes cannot be joined: {error}. Give coordinator, num_processes and process_id."
        ) from None


def check_agreement(facts: dict[str, Any]) -> None:
    """Refuses processes that would run different programs; nothing happens in a single one.

    Args:
        facts: by name what all must agree on; their text is compared. Versions of packages are added.

    Raises:
        InvalidInput: a process differs from the first one; the names of what differs are given, and what it is here.
    """
    if jax.process_count() == 1:
        return
    facts = {**{name: version(name) for name in ("jax", "jaxlib", "flax", "numpy")}, **facts}
    found = _differing(list(facts.values()))
    if found is not None:
        process, differing = found
        name, value = list(facts.items())[differing[0]]
        # All processes come here together. What of it differs is looked for where all have as many parts.
        parts = _parts(value)
        closer = _differing([len(parts), *(each for _, each in parts), *[None] * (_MOST_PARTS - len(parts))])
        if closer is not None and 0 not in closer[1]:
            part, value = parts[closer[1][0] - 1]
            name = f"{name} ({part})"
        names = ", ".join([name, *(list(facts)[index] for index in differing[1:])])
        raise InvalidInput(
            f"process {process} differs from process 0 in {names}; here it is {shown(value)}. Start all with the same "
            "versions, model and sizes."
        )


def _differing(values: list[Any]) -> tuple[int, list[int]] | None:
    """Returns the first process whose values are not those of the first one, and the indices of what differs."""
    digests = np.array([_digest(value) for value in values], np.uint32)
    every = np.asarray(multihost_utils.process_allgather(digests)).reshape(-1, len(values))
    for process, found in enumerate(every):
        if (found != every[0]).any():
            return process, np.flatnonzero(found != every[0]).tolist()
    return None


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Returns the fields of records, by name, and everything else as it is."""
    if isinstance(value, tuple):
        return [part for each in value for part in _parts(each)]
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return [(type(value).__name__, value)]


def check_together(check: Callable[[], Result]) -> Result:
    """Runs a check in every process, which all must call, and returns what it returns; or it fails in all.

    Raises:
        InvalidInput: it failed elsewhere; the first such process is named.
        BaseException: what it failed with here.
    """
    found, failure = [], None
    try:
        found.append(check())
    except BaseException as error:
        # Whatever it is, the others wait for what this process says.
        failure = error
    failed = np.flatnonzero(multihost_utils.process_allgather(np.array([failure is not None])))
    if failure is not None:
        raise failure
    if failed.size:
        raise InvalidInput(
            f"process {failed[0]} refused what it was given, so nothing has changed; its error says why."
        )
    return found[0]


class Channel:
    """Messages of the first process to the others, in order.

    Args:
        name: of the channel, the same in all processes and of no other channel.
    """

    def __init__(self, name: str) -> None:
        # JAX has no public name for its key-value store; multihost_utils uses this one, too.
        from jax._src import distributed

        client = distributed.global_state.client
        if client is None:
            raise Unsupported("this process was not joined to others; call jattn.engine.join first.")
        self._client, self._name, self._count = client, name, 0

    def send(self, what: str, *arguments: Any) -> None:
        """Says something to all other processes; does not wait for them. Only the first one speaks."""
        if jax.process_index():
            return
        self._client.key_value_set_bytes(self._key(self._count), _packed([what, *arguments]))
        if self._count >= _KEPT:
            self._client.key_value_delete(self._key(self._count - _KEPT))
        self._count += 1

    def receive(self) -> list[Any]:
        """Waits for the next message, however long that takes.

        Raises:
            RuntimeError: the first process is gone; JAX's error.
        """
        while True:
            try:
                data = self._client.blocking_key_value_get_bytes(self._key(self._count), _POLL_MILLISECONDS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    continue
                raise
            self._count += 1
            return _unpacked(data)

    def _key(self, index: int) -> str:
        return f"jattn/{self._name}/{index}"


def shared_channel(mesh: Mesh | None, config: EngineConfig, facts: dict[str, Any]) -> Channel | None:
    """Returns the channel of an engine whose mesh has devices of several processes; None for one of its own.

    Args:
        mesh: of the engine.
        config: of the engine.
        facts: what all processes must agree on, besides the config and versions.

    Raises:
        InvalidInput: they do not agree.
        Unsupported: blocks in host memory, of which each process would have some.
    """
    if mesh is None or jax.process_count() == 1:
        return None
    if len({device.process_index for device in mesh.devices.flat}) < jax.process_count():
        raise InvalidInput(
            f"the engine's mesh has devices of some of {jax.process_count()} processes; it must have some of each. Set "
            f"tensor_parallel_size to a multiple of {jax.process_count()}, {jax.device_count()} devices in all."
        )
    if config.num_host_blocks:
        raise Unsupported(
            f"num_host_blocks is {config.num_host_blocks}; over several processes blocks stay on the devices: 0."
        )
    processors = sorted(config.logits_processors or ())
    check_agreement({"config": (replace(config, mesh=None, logits_processors=None), processors), **facts})
    name = multihost_utils.broadcast_one_to_all(np.array(secrets.randbits(31), np.int32))
    return Channel(f"engine-{int(name)}")


def _packed(message: list[Any]) -> bytes:
    """Returns text, numbers, arrays and lists of them as the bytes of an npz file."""
    arrays: list[np.ndarray] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value)
            return {"array": len(arrays) - 1}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return int(value) if isinstance(value, np.integer) else value

    text = json.dumps(plain(message)).encode()
    file = io.BytesIO()
    np.savez(file, *arrays, text=np.frombuffer(text, np.uint8))
    return file.getvalue()


def _unpacked(data: bytes) -> list[Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:

        def restored(value: Any) -> Any:
            if isinstance(value, dict) and "array" in value:
                return arrays[f"arr_{value['array']}"]
            return [restored(each) for each in value] if isinstance(value, list) else value

        return restored(json.loads(arrays["text"].tobytes()))


def _digest(value: Any) -> int:
    text = json.dumps(value, default=str, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


#: Called with a name and arguments before the first process does what they say.
Announce = Callable[..., None]
