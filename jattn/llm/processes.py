"""One engine over the devices of several processes: the first schedules, the others repeat its operations.

Every process builds the same engine of the same model. The first process announces each device operation, and the
others repeat it, because XLA's collectives need every process to run every program. Announcements use the key-value
store of JAX's coordination service, not a collective: a collective would wait in the devices' queues for the steps in
flight, and an engine without requests would wait in one until it times out.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import itertools
import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from torch_core.base.checks import check_int, shown
from torch_core.base.errors import InvalidInput, Unsupported

Result = TypeVar("Result")

#: Of silence until JAX's coordination service takes a process for dead and ends the others.
HEARTBEAT_SECONDS = 20
# A message is deleted after this number of later messages. A step is a collective, so no process is that far behind.
_KEPT = 64
# Of weights that every process has, norms and biases, those up to this size are compared.
_SMALL_BYTES = 1 << 16
# The coordination service itself ends a process whose leader is gone; this long is waited for the next request at once.
_POLL_MILLISECONDS = 5_000


def join(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Makes this process one of several; call it before anything asks for a device.

    Args:
        coordinator: HOST:PORT of the first process; None (for the other arguments too) if JAX detects it (SLURM,
            Kubernetes, Open MPI).
        num_processes: total number of processes.
        process_id: index of this process, from 0.

    Raises:
        InvalidInput: an argument that is missing or out of range, or nothing to detect.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        wanted = f"give {', '.join(given)} all, or none where JAX finds them itself"
        raise InvalidInput(missing[0], value=None, wanted=wanted)
    if num_processes is not None:
        check_int("num_processes", num_processes, 1, 1 << 16)
        check_int("process_id", process_id, 0, num_processes - 1)
        if not isinstance(coordinator, str) or not coordinator.rpartition(":")[2].isdigit():
            raise InvalidInput("coordinator", value=coordinator, wanted="it must be HOST:PORT of the first process")
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except ValueError as error:
        text = f"the processes cannot be joined: {error}. Give coordinator, num_processes and process_id."
        raise InvalidInput(text) from None


def tell_failure(text: str) -> None:
    """Answers the other processes' next question with the reason why this process is missing; it may be alone.

    They would wait for its answer, and this process at its end, as JAX has it, for them.
    """
    if _joined() is not None:
        _answer(text)


def check_agreement(facts: dict[str, Any]) -> None:
    """Refuses processes that would run different programs; nothing happens in a single one.

    The text of the values of `facts` must be equal in all processes; versions of packages are added.
    """
    if jax.process_count() == 1:
        return
    # Versions of the imported modules: sources on a path have no metadata, or those of another copy.
    packages = ("jattn", "jax", "jaxlib", "flax", "numpy")
    facts = {**{name: importlib.import_module(name).__version__ for name in packages}, **facts}
    found = _differing(list(facts.values()))
    if found is not None:
        process, differing = found
        name, value = list(facts.items())[differing[0]]
        # All processes reach this point together. The differences are searched if all have the same number of parts.
        parts = _parts(value)
        closer = _differing([len(parts), *(each for _, each in parts)])
        if len(parts) > 1 and closer is not None and 0 not in closer[1]:
            part, value = parts[closer[1][0] - 1]
            name = f"{name} ({part})"
        names = ", ".join([name, *(list(facts)[index] for index in differing[1:])])
        raise InvalidInput(
            f"process {process} differs from process 0 in {names}; here it is {shown(value)}. Start all with the same "
            "versions, model and sizes."
        )


def model_facts(model: nnx.Module) -> tuple[Any, ...]:
    """Returns a model's facts, beyond its `PagedSpec`, that all processes must share, as its programs depend on them.

    A process cannot compare other processes' parts of the weights; the small weights, which all have, differ between
    most checkpoints.
    """
    served = [module for _, module in nnx.iter_modules(model) if hasattr(module, "paged_spec")]
    configs = [config for each in served if is_dataclass(config := getattr(each, "config", None))]
    flat = nnx.to_flat_state(nnx.state(model))
    leaves: list[Any] = [nnx.as_pure(leaf) for leaf in flat.leaves]
    numbers: Counter[str] = Counter()
    weights = hashlib.sha256()
    for leaf in leaves:
        numbers[str(leaf.dtype)] += leaf.size
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated and leaf.nbytes <= _SMALL_BYTES:
            weights.update(np.asarray(leaf.addressable_data(0)).tobytes())
    shapes = [(*map(str, path), str(leaf.dtype), *leaf.shape) for path, leaf in zip(flat.paths, leaves, strict=True)]
    return *configs, {"parameters": dict(numbers), "shapes": shapes, "weights": weights.hexdigest()}


def _differing(values: list[Any]) -> tuple[int, list[int]] | None:
    """Returns the first process whose values differ from those of process 0, and the indices of the differences."""
    every = _of_all([_digest(value) for value in values])
    for process, found in enumerate(every):
        if found != every[0]:
            pairs = itertools.zip_longest(found, every[0])
            return process, [index for index, (one, other) in enumerate(pairs) if one != other]
    return None


def _of_all(numbers: list[int]) -> list[list[int]]:
    """Returns the values of all processes, in order.

    This is not a collective: if processes have run different programs before, a collective would wait for ever.
    """
    turn, every = _answer(numbers), []
    for process in range(jax.process_count()):
        answer = json.loads(_awaited(_client(), f"jattn/turn/{turn}/{process}"))
        if isinstance(answer, str):
            raise InvalidInput(f"process {process} ended before the start: {answer}")
        every.append(answer)
    return every


def _answer(answer: list[int] | str) -> int:
    """Answers the next question, whose number is returned."""
    client, own = _client(), jax.process_index()
    # The service counts, so that no answer is one to an earlier question.
    turn = client.key_value_increment(f"jattn/turn/{own}", 1)
    client.key_value_set_bytes(f"jattn/turn/{turn}/{own}", json.dumps(answer).encode())
    return turn


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Returns the fields of records and the entries of mappings, by name, and everything else as it is."""
    if isinstance(value, tuple):
        return [part for each in value for part in _parts(each)]
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return [(type(value).__name__, value)]


def check_together(check: Callable[[], Result]) -> Result:
    """Runs a check in every process (all must call this), and returns its result; a failure fails in all."""
    found, failure = [], None
    try:
        found.append(check())
    except BaseException as error:
        # Catch every exception: the others wait for this process's answer.
        failure = error
    failed = np.flatnonzero(multihost_utils.process_allgather(np.array([failure is not None])))
    if failure is not None:
        raise failure
    if failed.size:
        text = f"process {failed[0]} refused what it was given, so nothing has changed; its error says why."
        raise InvalidInput(text)
    return found[0]


class Channel:
    """Messages of the first process to the others, in order; the name is the same in all processes."""

    def __init__(self, name: str) -> None:
        self._client, self._name, self._count = _client(), name, 0

    def send(self, what: str, *arguments: Any) -> None:
        """Says something to all other processes; does not wait for them. Only the first one speaks."""
        if jax.process_index():
            return
        self._client.key_value_set_bytes(self._key(self._count), _packed([what, *arguments]))
        if self._count >= _KEPT:
            self._client.key_value_delete(self._key(self._count - _KEPT))
        self._count += 1

    def receive(self) -> list[Any]:
        """Waits for the next message, however long that takes."""
        data = _awaited(self._client, self._key(self._count))
        self._count += 1
        return _unpacked(data)

    def _key(self, index: int) -> str:
        return f"jattn/{self._name}/{index}"


def _joined() -> Any:
    """Returns JAX's key-value store, for which it has no public name; None in a process that was not joined."""
    from jax._src import distributed

    # multihost_utils uses this one, too.
    return distributed.global_state.client


def _client() -> Any:
    client = _joined()
    if client is None:
        raise Unsupported("this process was not joined to others; call jattn.llm.engine.join first.")
    return client


def _awaited(client: Any, key: str) -> bytes:
    """Returns the value of a key, and waits for it without a limit."""
    while True:
        try:
            return client.blocking_key_value_get_bytes(key, _POLL_MILLISECONDS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def shared_channel(mesh: Mesh | None, facts: Callable[[], dict[str, Any]], *, num_host_blocks: int) -> Channel | None:
    """Returns the channel of an engine whose mesh has devices of several processes; None for one of its own.

    `facts` returns the values that must be equal in all processes, in addition to versions.
    """
    if mesh is None or jax.process_count() == 1:
        return None
    if len({device.process_index for device in mesh.devices.flat}) < jax.process_count():
        raise InvalidInput(
            f"the engine's mesh has devices of some of {jax.process_count()} processes; it must have some of each. Set "
            f"tensor_parallel_size to a multiple of {jax.process_count()}, {jax.device_count()} devices in all."
        )
    if num_host_blocks:
        wanted = "over several processes blocks stay on the devices: 0"
        raise Unsupported("num_host_blocks", value=num_host_blocks, wanted=wanted)
    check_agreement(facts())
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


#: Called with a name and arguments before the first process runs the operation.
Announce = Callable[..., None]
