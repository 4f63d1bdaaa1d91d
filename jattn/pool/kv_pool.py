"""The memory of the block ids: one cache array per layer, donated to every step and never copied."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jattn import bridge
from jattn.pool import programs
from jattn.pool.checks import (
    DROP_VIEWS,
    Guard,
    are_arrays,
    check_donation,
    check_made_of,
    check_states,
    checked_blocks,
    checked_split,
    is_placed,
    local_bytes,
    refuse_foreign_views,
    refuse_repeated,
    state_shardings,
)
from jattn.pool.moves import BlockMoves, SwapExecutor
from jattn.pool.plan import check_room
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, OutOfMemory
from torch_core.base.owners import Owner
from torch_core.base.specs import CacheSpec, StateCacheSpec

if TYPE_CHECKING:
    import torch


_config: Any = jax.config
_STATES_AT_ONCE = 16

Result = TypeVar("Result")


class KVPool(Owner):
    """Owns the cache arrays of a model; JAX allocates them and every step consumes and returns them.

    A step is a function `step(kv_caches, *args) -> (result, kv_caches)` jitted with `donate_argnums=0`. `run` passes it
    the arrays and keeps the returned ones, so no stale handle exists. Not thread-safe: one step at a time.

    Args:
        spec: the layout of one layer: keys and values, or latents.
        num_layers: number of arrays to allocate.
        further: layouts of further layers with the same block size, such as a draft model's.
        states: layouts of the layers with a recurrent state. Their arrays follow those of blocks, those of a layer one
            after the other.
        num_slots: state slots of each such array, the null slot 0 included.
        state_axis: mesh axis that splits states along their `split_axes`; None for all of them on every device.
        num_blocks: blocks of each array, the null block 0 included.
        device: where to allocate; JAX's default device if None. A NamedSharding that splits the heads, as in
            `NamedSharding(mesh, PartitionSpec(None, None, None, "tp"))`, the blocks (axis 0), or both, spreads the pool
            over a mesh; latents, which all heads share, are whole on every device. Split blocks have consecutive
            numbers over all parts; the first one of each part is a null block too.

    Attributes:
        specs: the layout of each layer with blocks.
        states: the layout of each layer with a state.
        num_slots: state slots, the null slot included; 0 without states.
        num_blocks: blocks of each array, the null block included.
        sharding: the sharding of the arrays of the first layer over a mesh; None on one device.
        shardings: the sharding of each array that a step is given; None on one device.
        generation: counts the allocations; a higher number means that all earlier contents are gone.

    Raises:
        InvalidInput: sizes out of range or another split.
        OutOfMemory: more memory than a device has free, or has in pieces of an array; nothing was allocated.

    Example:
        >>> from torch_core.base.specs import KVCacheSpec
        >>> spec = KVCacheSpec(num_kv_heads=2, head_size=8, block_size=4, dtype="float32")
        >>> pool = KVPool(spec, num_layers=1, num_blocks=8)
        >>> step = jax.jit(lambda kv_caches: (0, [cache + 1 for cache in kv_caches]), donate_argnums=0)
        >>> before = pool.addresses()
        >>> int(pool.run(step)), pool.addresses() == before
        (0, True)
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        num_layers: int,
        num_blocks: int,
        further: Sequence[CacheSpec] = (),
        states: Sequence[StateCacheSpec] = (),
        num_slots: int = 0,
        state_axis: str | None = None,
        device: jax.Device | jax.sharding.Sharding | None = None,  # pyright: ignore[reportInvalidTypeForm]
    ) -> None:
        check_int("num_layers", num_layers, 1)
        check_int("num_blocks", num_blocks, 2)
        self.specs = (*[spec] * num_layers, *further)
        check_made_of(self.specs, device)
        self.states = check_states(states, num_slots, device)
        self.num_slots = num_slots
        for index, each in enumerate(further):
            if each.block_size != spec.block_size:
                problem = f"has block_size {each.block_size} and spec {spec.block_size}"
                raise InvalidInput(f"further[{index}]", problem, "they must be equal")
        self.num_blocks = num_blocks
        self._layers = [(each.shape(num_blocks), jnp.dtype(each.dtype)) for each in self.specs]
        self._blocks, self._slots, self._all = slice(len(self._layers)), slice(len(self._layers), None), slice(None)
        for each in self.states:
            self._layers += zip(each.array_shapes(num_slots), map(jnp.dtype, each.dtypes), strict=True)
        self._device = device
        self._views: list[weakref.ref[torch.Tensor]] = []
        self.generation = 1
        sharding = device if isinstance(device, jax.sharding.Sharding) else None
        self.sharding: NamedSharding | None = None
        if sharding is not None:
            self.sharding, *_ = [checked_split(sharding, shape) for shape, _ in self._layers[self._blocks]]
        self.shardings: tuple[NamedSharding | None, ...] = (self.sharding,) * len(self._layers)
        if self.sharding is not None:
            of_states = state_shardings(self.sharding, self.states, state_axis)
            self.shardings = (*self.shardings[self._blocks], *of_states)
        for each in (device,) if sharding is None else sharding.addressable_devices:
            check_room(sum(map(local_bytes, self._layers, self.shardings)), each)
        self._arrays: tuple[jax.Array, ...] = self._allocate()

    @property
    def spec(self) -> CacheSpec:
        """The layout of the first layer."""
        return self.specs[0]

    @property
    def num_layers(self) -> int:
        """Number of cache arrays of blocks."""
        return len(self.specs)

    @property
    def shapes(self) -> tuple[tuple[tuple[int, ...], Any], ...]:
        """Shape and dtype of each array that a step is given."""
        return tuple(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays together."""
        blocks = self.num_blocks * sum(spec.bytes_per_block for spec in self.specs)
        return blocks + self.num_slots * sum(spec.bytes_per_slot for spec in self.states)

    def addresses(self) -> tuple[int, ...]:
        """Returns the data pointer of each layer's array, or of each of its shards; constant for one generation."""
        return tuple(array.unsafe_buffer_pointer() for array in self._shards())

    @property
    def is_closed(self) -> bool:
        """The pool holds no memory, until `renew`."""
        return not self._arrays

    def is_lost(self) -> bool:
        """Returns whether the contents are gone: consumed by a step that failed or was interrupted, or closed."""
        if self.is_closed or any(array.is_deleted() for array in self._arrays):
            return True
        try:
            jax.block_until_ready(self._arrays)
        except (jax.errors.JaxRuntimeError, ValueError):
            return True
        return False

    def renew(self) -> None:
        """Allocates a new pool: zeros, and a higher generation."""
        self.generation += 1
        self._arrays = ()
        self._arrays = self._allocate()

    def close(self) -> None:
        """Frees the memory now, even if this object is still referenced; `renew` would allocate it again.

        Raises:
            InvalidInput: a torch view of the pool is alive.
        """
        self._refuse_live_views()
        arrays, self._arrays = self._arrays, ()
        for array in arrays:
            array.delete()

    def run(self, step: Callable[..., tuple[Result, Any]], *args: Any) -> Result:
        """Runs `step(kv_caches, *args)`, keeps the caches it returns and gives back its result.

        Args:
            step: jitted with `donate_argnums=0`, returns `(result, kv_caches)`.
            *args: its other arguments.

        Raises:
            InvalidInput: a torch view of the pool is alive, or the step did not consume or return the caches. The pool
                stays usable; its content is unchanged unless the message says otherwise.
            Unsupported: a setting of JAX is on under which nothing is donated.
            PoolLost: the step failed after it had consumed the caches. A new pool is allocated, filled with zeros, with
                a higher generation; the cause is chained.
        """
        return self._run(self._all, step, *args)

    def _run(self, part: slice, step: Callable[..., tuple[Result, Any]], *args: Any) -> Result:
        """Does what `run` does with a part of the arrays."""
        if self._views:
            self._refuse_live_views()
        if _config.jax_disable_jit or _config.jax_debug_nans or _config.jax_debug_infs:
            check_donation()
        everything = self._arrays or self._opened()
        before, layers = everything[part], self._layers[part]
        try:
            returned: Any = step(before, *args)
            is_pair = isinstance(returned, tuple | list) and len(returned) == 2
            pair: Any = returned if is_pair else (None, ())
            caches = pair[1:] if isinstance(pair[1], jax.Array) else pair[1]
            is_pair = is_pair and isinstance(caches, tuple | list) and are_arrays(caches, type(everything[0]))
            result, after = pair[0], tuple(caches) if is_pair else ()
            fits = is_pair and [(array.shape, array.dtype) for array in after] == layers
            fits = fits and (self.sharding is None or all(map(is_placed, after, self.shardings[part])))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            with self.guard():
                refuse_foreign_views(error)
                raise
        except BaseException:
            with self.guard():
                raise
        consumed, fate = [array.is_deleted() for array in before], "still holds what it held"
        if not fits:
            split = () if self.sharding is None else (self.sharding.spec,)
            arrays = [(array.shape, array.dtype.name, *(array.sharding for _ in split)) for array in after]
            no_pair = f"a {type(returned).__name__} instead of (result, kv_caches)"
            found = f"kv_caches of {arrays}" if is_pair else no_pair
            if any(consumed):
                self.renew()
                fate = f"was allocated anew, generation {self.generation}: compute every sequence again"
            kinds = Counter(" ".join(map(str, (shape, dtype, *split))) for shape, dtype in layers)
            wanted = " and ".join(f"{count} arrays of {kind}" for kind, count in kinds.items())
            raise InvalidInput(f"the step returned {found}; it must return {wanted}. The pool {fate}.")
        if not all(consumed):
            if any(consumed):
                # Only the returned arrays are complete.
                self._arrays, fate = self._with(part, after), "holds what the step returned"
            raise InvalidInput(
                f"the step did not consume kv_caches[{consumed.index(False)}], so XLA copied it: jit the step with "
                f"donate_argnums=0, and {DROP_VIEWS}. The pool {fate}."
            )
        self._arrays = self._with(part, after)
        return result

    def _with(self, part: slice, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        if part is self._all:
            return arrays
        return arrays + self._arrays[self._slots] if part is self._blocks else self._arrays[self._blocks] + arrays

    def guard(self) -> AbstractContextManager[None]:
        """Turns a step's failure into the callback's own error, or into `PoolLost` if the caches went with it.

        JAX reports a failure when a caller waits for a result, which may be after `run` has returned: wait for a
        step's results inside this block.

        Raises:
            PoolLost: the caches were consumed; a new pool is allocated. An interrupt stays an interrupt.
        """
        return Guard(self)

    def prepare(self, step: BlockMoves, host: SwapExecutor | None = None) -> None:
        """Executes a committed step's operations on whole blocks and slots, in this order: scrubs, swaps, copies.

        Call it once for every committed step, before the step itself: a block that the allocator assigns was scrubbed
        by then. Device work, in the order of the steps; nothing waits but for blocks on their way to the host.

        Args:
            step: `torch_core.cache.CommittedStep`.
            host: host memory of swapped blocks; None for a cache without host blocks.

        Raises:
            InvalidInput: an id is not in the pool, or the step swaps and there is no `host`.
        """
        swaps = len(step.swaps) + len(step.state_swaps)
        if swaps and host is None:
            raise InvalidInput(f"the step has {swaps} swaps; give the HostBlocks that hold them as host.")
        self.scrub_blocks(step.blocks_to_scrub)
        self.scrub_states(step.slots_to_scrub)
        if swaps and host is not None:
            host.execute(step.swaps, step.state_swaps)
        self.copy_blocks(step.copies)
        self.copy_states(step.state_copies)

    def copy_blocks(self, copies: Sequence[tuple[int, ...]]) -> None:
        """Copies whole blocks in every layer, on the device and in the order of the steps: copy-on-write.

        Args:
            copies: pairs (source, target), or records that begin so (`torch_core.cache.BlockCopy`). No block is the
                target of two.

        Raises:
            InvalidInput: an id is not in the pool, a block is the target of two, or blocks are split and a copy is not
                within one part; nothing was copied.
        """
        pairs = checked_blocks("copies", [copy[:2] for copy in copies], self.num_blocks, pairs=True)
        if not pairs.size:
            return
        refuse_repeated("copies", pairs[:, 1])
        part = pairs // self._blocks_of_a_part
        apart = np.flatnonzero(part[:, 0] != part[:, 1])
        if apart.size:
            problem = f"is {tuple(pairs[apart[0]].tolist())}, two blocks of different devices"
            wanted = f"a block is copied among the {self._blocks_of_a_part} of one"
            fix = "Read it and write it, or compute it again"
            raise InvalidInput(f"copies[{int(apart[0])}]", problem, f"{wanted}. {fix}")
        program, padded = programs.copy_program(self._first_device(), pairs)
        self._run(self._blocks, self._on_parts(program), padded)

    def scrub_blocks(self, blocks: Sequence[int]) -> None:
        """Fills whole blocks with zeros in every layer, on the device and in the order of the steps.

        Args:
            blocks: ids; none of them in use by a sequence that still needs it.

        Raises:
            InvalidInput: an id is not in the pool; nothing was changed.
        """
        ids = checked_blocks("blocks", blocks, self.num_blocks)
        if ids.size:
            self._run(self._blocks, self._on_parts(programs.scrub_blocks), programs.pad_blocks(ids))

    def copy_states(self, copies: Sequence[tuple[int, ...]]) -> None:
        """Copies whole state slots in every layer with a state; as `copy_blocks`, all sources are read first.

        Args:
            copies: pairs (source, target); no slot is the target of two.

        Raises:
            InvalidInput: a slot is not in the pool, or is the target of two; nothing was copied.
        """
        pairs = checked_blocks("copies", [copy[:2] for copy in copies], self.num_slots, pairs=True, noun="slot")
        if pairs.size:
            refuse_repeated("copies", pairs[:, 1], noun="slot")
            # All sources are read first; the states of some sequences fit beside the pool, those of a batch may not.
            size = len(pairs) if np.isin(pairs[:, 0], pairs[:, 1]).any() else _STATES_AT_ONCE
            for first in range(0, len(pairs), size):
                program = programs.given_from_the_host(programs.copy_blocks)
                self._run(self._slots, program, programs.pad_blocks(pairs[first : first + size]))

    def scrub_states(self, slots: Sequence[int]) -> None:
        """Fills whole state slots with zeros; as `scrub_blocks`."""
        ids = checked_blocks("slots", slots, self.num_slots, noun="slot")
        if ids.size:
            self._run(self._slots, programs.given_from_the_host(programs.scrub_blocks), programs.pad_blocks(ids))

    def warmup(self, *, copies: int = 0, scrubs: int = 0, swaps: int = 0) -> None:
        """Compiles the programs for up to these numbers of copies, scrubs and swaps, by runs on the null block."""
        for size in programs.padded_sizes(copies):
            for program, nothing in programs.copy_programs(self._first_device()):
                self._run(self._blocks, self._on_parts(program), np.full((size, 2), nothing, np.int32))
            self.copy_states([(0, 0)] * size if self.states else ())
        for size in programs.padded_sizes(scrubs):
            self.scrub_blocks([0] * size)
        for size in programs.padded_sizes(min(scrubs, self.num_slots)):
            self.scrub_states([0] * size)
        for size in programs.padded_sizes(swaps):
            self.write_blocks([0] * size, self.read_blocks([0] * size))

    def read_blocks(self, blocks: Sequence[int]) -> list[np.ndarray]:
        """Copies whole blocks to the host: for each layer [len(blocks), ...], the rest as in the layer's cache.

        Raises:
            InvalidInput: an id is not in the pool.
        """
        ids = checked_blocks("blocks", blocks, self.num_blocks)
        return self._read(self._blocks, self._on_parts(programs.read_blocks), ids)

    def read_states(self, slots: Sequence[int]) -> list[np.ndarray]:
        """Copies whole state slots to the host; as `read_blocks`."""
        ids = checked_blocks("slots", slots, self.num_slots, noun="slot")
        return self._read(self._slots, programs.given_from_the_host(programs.read_blocks), ids)

    def _read(self, part: slice, program: Callable[..., Any], ids: np.ndarray) -> list[np.ndarray]:
        arrays = self._opened()[part]
        with self.guard():
            found = program(arrays, programs.pad_blocks(ids))
            return [layer[: len(ids)] for layer in jax.device_get(found)]

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[np.ndarray]) -> None:
        """Copies whole blocks from the host, in the order of the steps.

        Args:
            blocks: distinct ids.
            contents: for each layer the result of `read_blocks`.

        Raises:
            InvalidInput: an id is not in the pool or comes twice, or the contents have another shape or dtype; nothing
                was changed.
        """
        ids = checked_blocks("blocks", blocks, self.num_blocks)
        refuse_repeated("blocks", ids)
        self._check_contents(self._blocks, ids, contents)
        padded = programs.pad_blocks(ids)
        place = self._opened()[0].sharding
        if self.sharding is not None:
            place = NamedSharding(self.sharding.mesh, PartitionSpec(None, *self.sharding.spec[1:]))
        new = jax.device_put([programs.pad_blocks(layer) for layer in contents], place)
        self._run(self._blocks, self._on_parts(programs.write_blocks), padded, new)

    def write_states(self, slots: Sequence[int], contents: Sequence[np.ndarray]) -> None:
        """Copies whole state slots from the host; as `write_blocks`."""
        ids = checked_blocks("slots", slots, self.num_slots, noun="slot")
        refuse_repeated("slots", ids, noun="slot")
        self._check_contents(self._slots, ids, contents)
        padded = programs.pad_blocks(ids)
        new = [
            jax.device_put(programs.pad_blocks(layer), array.sharding)
            for layer, array in zip(contents, self._opened()[self._slots], strict=True)
        ]
        self._run(self._slots, programs.given_from_the_host(programs.write_blocks), padded, new)

    def _check_contents(self, part: slice, ids: np.ndarray, contents: Sequence[np.ndarray]) -> None:
        found = [(layer.shape, layer.dtype) for layer in contents]
        needed = [((len(ids), *shape[1:]), dtype) for shape, dtype in self._layers[part]]
        if found != needed:
            kinds = Counter(f"{shape} {dtype.name}" for shape, dtype in needed)
            wanted = " and ".join(f"{count} arrays of {kind}" for kind, count in kinds.items())
            wanted = f"{wanted} are required"
            raise InvalidInput("contents", f"are {[(shape, dtype.name) for shape, dtype in found]}", wanted)

    def as_torch(self) -> tuple[torch.Tensor, ...]:
        """Views every layer as a torch tensor over the same memory, for torch to read and write in place.

        Of a pool that is spread over a mesh each shard is a tensor, those of a layer side by side.

        The views must be gone before the next `run`: a live one would make XLA copy the pool. On CUDA also wait for
        torch's work on them first.
        """
        self._opened()
        views = tuple(bridge.to_torch(jax.block_until_ready(array)) for array in self._shards())
        self._views += map(weakref.ref, views)
        return views

    def _allocate(self) -> tuple[jax.Array, ...]:
        arrays: list[jax.Array] = []
        try:
            # zeros on the device rather than an upload: XLA's CPU backend may alias an uploaded numpy array, and such a
            # buffer cannot be donated in place.
            with jax.transfer_guard_host_to_device("allow"):
                # Committed from the first: once something committed is written to it, jit would compile all again.
                # Under a mesh of the caller's an array of no device in particular lies on all of them.
                first = min(jnp.zeros(()).devices(), key=lambda each: each.id)
                device = first if self._device is None else self._device
                for (shape, dtype), sharding in zip(self._layers, self.shardings, strict=True):
                    # A GPU reports an allocation that failed when it is awaited, and after ten seconds: each by itself,
                    # so that none is asked for behind it.
                    arrays.append(jax.block_until_ready(jnp.zeros(shape, dtype, device=sharding or device)))
            return tuple(arrays)
        except jax.errors.JaxRuntimeError as error:
            for array in arrays:
                array.delete()
            needed = f"{len(self._layers)} arrays, {self.num_bytes:,} bytes"
            wanted = f"the device has no room for its {needed}; ask for fewer"
            refused = OutOfMemory("num_blocks", value=self.num_blocks, wanted=wanted)
            refused.share = len(arrays) / len(self._layers)
            raise refused from error

    def _shards(self) -> list[jax.Array]:
        if self.sharding is None:
            return list(self._arrays)
        return [shard.data for array in self._arrays for shard in array.addressable_shards]

    def _first_device(self) -> Any:
        return next(iter(self._opened()[0].devices()))

    def _opened(self) -> tuple[jax.Array, ...]:
        if self._arrays:
            return self._arrays
        raise InvalidInput("the pool holds no memory: it was closed. renew() allocates it again.")

    @property
    def _blocks_of_a_part(self) -> int:
        shape, _ = self._layers[0]
        return (shape if self.sharding is None else self.sharding.shard_shape(shape))[0]

    def _on_parts(self, program: Callable[..., Any]) -> Callable[..., Any]:
        if self.sharding is not None and self._blocks_of_a_part < self.num_blocks:
            # On CUDA too by XLA's own scatter: the kernel knows no ids past the end.
            plain = programs.copy_blocks if program is programs.copy_blocks_native else program
            program = programs.on_parts(plain, self.sharding)
        return programs.given_from_the_host(program)

    def _refuse_live_views(self) -> None:
        self._views = [view for view in self._views if view() is not None]
        if self._views:
            raise InvalidInput(
                f"{len(self._views)} torch views from as_torch() are alive; XLA would copy the pool instead of "
                "updating it in place. Delete them (and what was sliced from them) before the next step."
            )
