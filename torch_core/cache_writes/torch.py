"""Writes to the paged cache, on torch tensors by keywords."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_core.attention.checks import cache_fields
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.cache_writes.rotary_call import RotaryWriteCall
from torch_core.launch.public import documented
from torch_core.launch.run import run, run_all


@documented(WriteCall, "Tensor")
def write_kv_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> None:
    """Stores new keys and values in the cache, in place.

    The exact semantics are those of `torch_core.reference.write_kv_cache`: token t goes to slot `slot_mapping[t]`
    (block * block_size + offset), a negative slot writes nothing, fp8 and int8 caches saturate.

    Example:
        >>> import torch
        >>> cache = torch.zeros(2, 2, 4, 1, 1)
        >>> slots = torch.tensor([5, -1], dtype=torch.int32)
        >>> write_kv_cache(torch.ones(2, 1, 1), torch.ones(2, 1, 1) * 2, cache, slots)
        >>> cache[1, :, :, 0, 0]
        tensor([[0., 1., 0., 0.],
                [0., 2., 0., 0.]])
    """
    run(
        WriteCall(
            key=key,
            value=value,
            **cache_fields(kv_cache),
            slot_mapping=slot_mapping,
            k_scale=k_scale,
            v_scale=v_scale,
            k_scale_cache=k_scale_cache,
            v_scale_cache=v_scale_cache,
        )
    )


@documented(RotaryWriteCall, "Tensor")
def rotate_and_write(
    qkv: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    is_neox_style: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Rotates queries and keys, stores keys and values in the cache, in place, and returns the queries.

    Returns:
        `[num_tokens, num_heads, head_size]`, rotated; those of tokens without a slot too.

    Example:
        >>> import torch
        >>> cache, turn = torch.zeros(2, 2, 1, 1, 2), torch.tensor([[0.0, 1.0]])
        >>> rotate_and_write(torch.ones(1, 3, 2), cache, torch.tensor([1], dtype=torch.int32), turn)
        tensor([[[-1.,  1.]]])
    """
    call = RotaryWriteCall(
        qkv=qkv,
        kv_cache=kv_cache,
        slot_mapping=slot_mapping,
        cos_sin=cos_sin,
        k_scale=k_scale,
        v_scale=v_scale,
        is_neox_style=is_neox_style,
        out=out,
    )
    return run(call)["out"]


def copy_blocks(kv_caches: Tensor | Sequence[Tensor], block_mapping: Tensor) -> None:
    """Copies whole blocks inside each cache array, in place: the copy of copy-on-write.

    Args:
        kv_caches: one array whose first axis is the block, or several, one per layer.
        block_mapping: int32 `[num_pairs, 2]` of source and destination; a pair with a negative entry copies nothing.
            No destination may be another pair's source or destination.

    Raises:
        InvalidInput: shapes, dtypes or devices that do not fit; on the CPU also blocks out of range and destinations
            that another pair reads or writes.
        Unsupported: a device without an implementation.

    Example:
        >>> import torch
        >>> cache = torch.tensor([[0.0], [1.0], [2.0]])
        >>> copy_blocks(cache, torch.tensor([[1, 2]], dtype=torch.int32))
        >>> cache.flatten().tolist()
        [0.0, 1.0, 1.0]
    """
    caches = [kv_caches] if isinstance(kv_caches, Tensor) else kv_caches
    run_all([CopyCall(kv_cache=kv_cache, block_mapping=block_mapping) for kv_cache in caches])
