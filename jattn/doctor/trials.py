"""The parts of the doctor that run something: attention with each implementation, shared memory, the donated pool."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from torch_core.base.errors import JattnError

_POOL_STEPS = 10
#: TF32 or a 16-bit product inside a kernel stays below, a wrong mask or block does not.
_TOLERANCE = 1e-2


def implementations() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields each implementation, tried, and the one that is used when none is named."""
    from jattn.ops import available_implementations
    from jattn.ops.choose import choose

    for name, reason in available_implementations().items():
        yield name, functools.partial(_try_implementation, name, reason)
    yield "default", functools.partial(choose, None)


def _try_implementation(name: str, reason: str | None) -> str:
    if reason is not None:
        return f"not here: {reason}"
    difference = _attention_error(name)
    if not difference <= _TOLERANCE:
        raise JattnError(f"a small paged attention is off by {difference:.1e} from numpy")
    return f"works (a small paged attention is {difference:.0e} from numpy)"


def _attention_error(implementation: str) -> float:
    """Writes two short sequences into a paged cache, attends, and returns the largest difference to numpy."""
    import jax
    import jax.numpy as jnp

    from jattn.ops import paged_attention, write_kv_cache

    # Sizes that the kernels serve too: 4 query heads over 2 heads of 64, blocks of 16, 20 and 3 tokens.
    lengths, head_size, block_size = (20, 3), 64, 16
    total = sum(lengths)
    random = np.random.default_rng(0)
    query = random.standard_normal((total, 4, head_size)).astype(np.float32)
    key, value = random.standard_normal((2, total, 2, head_size)).astype(np.float32)
    tables = np.array([[3, 1], [2, 0]], np.int32)
    all_slots = (tables[..., None] * block_size + np.arange(block_size, dtype=np.int32)).reshape(len(lengths), -1)
    slots = np.concatenate([row[:size] for row, size in zip(all_slots, lengths, strict=True)])
    starts = np.cumsum([0, *lengths]).astype(np.int32)

    @jax.jit
    def attend(key: jax.Array, value: jax.Array, query: jax.Array) -> jax.Array:
        cache = jnp.zeros((4, 2, block_size, 2, head_size), jnp.float32)
        cache = write_kv_cache(key, value, cache, jnp.asarray(slots), implementation=implementation)
        arrays = map(jnp.asarray, (tables, np.array(lengths, np.int32), starts))
        return paged_attention(query, cache, *arrays, max_query_len=max(lengths), implementation=implementation)

    found = np.asarray(attend(key, value, query), np.float64)
    expected = [_attended(query[a:b], key[a:b], value[a:b]) for a, b in itertools.pairwise(starts)]
    return float(np.abs(found - np.concatenate(expected)).max())


def _attended(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    query, key, value = (array.astype(np.float64) for array in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat(group, axis=1), value.repeat(group, axis=1)
    scores = np.einsum("ihd,jhd->hij", query, key) * query.shape[2] ** -0.5
    scores = np.where(np.tri(len(query), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), value)


def bits() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields whether torch's CPU attention gives a sequence the same bits in any batch."""
    yield "torch on the CPU", _batch_bits


def _batch_bits() -> str:
    import torch

    from torch_core.base.specs import AttentionSpec
    from torch_core.ops import paged_attention

    num_seqs, block_size, spec = 6, 16, AttentionSpec(scale=0.2)
    random = torch.Generator().manual_seed(0)
    differing = 0
    # Sequences of 64 tokens whose rows meet every kind of product: one to four query heads for each key head.
    for group in (1, 2, 3, 4):
        query = torch.randn(num_seqs, 2 * group, 32, generator=random)
        cache = torch.randn(1 + 4 * num_seqs, 2, block_size, 2, 32, generator=random)
        tables = torch.arange(1, 1 + 4 * num_seqs, dtype=torch.int32).view(num_seqs, 4)
        lens = torch.full((num_seqs,), 4 * block_size, dtype=torch.int32)
        starts, options = torch.arange(num_seqs + 1, dtype=torch.int32), {"spec": spec, "max_query_len": 1}
        together = paged_attention(query, cache, tables, lens, starts, **options)
        singles = zip(query.split(1), tables.split(1), lens.split(1), strict=True)
        alone = [paged_attention(q, cache, table, length, starts[:2], **options) for q, table, length in singles]
        differing += int((together != torch.cat(alone)).sum())
    if differing:
        return f"a sequence's bits change with its batch ({differing} values); MKL_CBWR=COMPATIBLE keeps them under MKL"
    return f"a sequence's bits are the same in any batch, with {torch.get_num_threads()} threads"


def shared_memory() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields whether arrays cross the bridge without a copy and the pool stays in place."""
    yield from (("jax to torch", _view_in_torch), ("torch to jax", _view_in_jax), ("pool address", _pool_address))


def _view_in_torch() -> str:
    import jax.numpy as jnp

    from jattn.bridge import to_torch

    # The bridge itself refuses arrays that it would have to copy.
    to_torch(jnp.arange(64.0))
    return "zero-copy"


def _view_in_jax() -> str:
    import jax
    import torch

    from jattn.bridge import to_jax

    on_cuda = jax.default_backend() == "gpu" and torch.cuda.is_available()
    to_jax(torch.zeros(64, device="cuda" if on_cuda else "cpu"))
    return "zero-copy"


def _pool_address() -> str:
    import jax
    import jax.numpy as jnp

    from jattn.ops import write_kv_cache
    from jattn.pool import KVPool
    from torch_core.base.specs import KVCacheSpec

    spec = KVCacheSpec(num_kv_heads=1, head_size=64, block_size=16, dtype="float32")
    pool = KVPool(spec, num_layers=2, num_blocks=4)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(kv_caches: tuple[jax.Array, ...], token: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        return token, [write_kv_cache(token, token, cache, jnp.array([17], jnp.int32)) for cache in kv_caches]

    token = jnp.ones((1, 1, 64))
    before = pool.addresses()
    for number in range(_POOL_STEPS):
        pool.run(step, token)
        if pool.addresses() != before:
            raise JattnError(f"the donated pool moved in step {number}: XLA copies it instead of writing in place")
    return f"the same after {_POOL_STEPS} donated steps"
