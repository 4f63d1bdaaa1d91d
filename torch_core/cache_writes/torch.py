"""What is done to the paged cache, and the merge of partial results, on torch tensors by keywords."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_core.attention.call import cache_fields
from torch_core.attention.merge_call import MergeCall
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.cache_writes.rotary_call import RotaryWriteCall
from torch_core.launch.run import run, run_all
from torch_core.launch.tensors import dtype_name

__all__ = ["copy_blocks", "merge_states", "rotate_and_write", "write_kv_cache"]


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

    Args:
        key: `[num_tokens, num_kv_heads, head_size]`.
        value: `[num_tokens, num_kv_heads, value_head_size]`.
        kv_cache: as in `paged_attention`; written in place.
        slot_mapping: int32 `[rows]`, `rows <= num_tokens`; tokens after it are padding.
        k_scale: an element is stored as `real / scale`; a number or a one-element float32 tensor; None for 1.
        v_scale: the same for values.
        k_scale_cache: float32 `[num_blocks, block_size, num_kv_heads]`: scales are found per token and head, and
            written here.
        v_scale_cache: the same for values.

    Raises:
        InvalidInput: ranks, shapes, dtypes, devices or, on the CPU, slots that do not fit; both kinds of scale.
        Unsupported: a device without an implementation.

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

    Args:
        qkv: `[num_tokens, num_heads + 2 * num_kv_heads, head_size]`: queries, keys and values.
        kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_size]`; written in place.
        slot_mapping, k_scale, v_scale: as in `write_kv_cache`.
        cos_sin: `[num_tokens, rotated_dim]`, of each token the cosines and then the sines of its angles.
        is_neox_style: element i is rotated with element i + rotated_dim / 2; otherwise neighbours are.
        out: where the queries go; None makes a new tensor.

    Returns:
        `[num_tokens, num_heads, head_size]`, rotated; those of tokens without a slot too.

    Raises:
        InvalidInput: ranks, shapes, dtypes, devices or, on the CPU, slots that do not fit.
        Unsupported: a device without an implementation.

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


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    out_scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    num_tokens_a: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges two attention results over disjoint sets of keys into the result over their union.

    The exact semantics are those of `torch_core.reference.merge_states`: a state with lse -inf (or +inf) is empty and
    its output is not read; two empty states give zeros and -inf.

    Args:
        out_a: `[num_tokens, num_heads, head_size]`.
        lse_a: float32 `[num_tokens, num_heads]`, natural logarithm.
        out_b: as `out_a`.
        lse_b: as `lse_a`.
        out: like the merged output, written and returned; it may be `out_a` or `out_b`. None makes one.
        lse: the same for the merged lse.
        out_scale: for an fp8 `out`, which then holds `result / out_scale`, saturated.
        out_dtype: of a new output; that of `out_a` when None.
        num_tokens_a: tokens from this one on have no first state.

    Returns:
        The merged output and the merged lse.

    Raises:
        InvalidInput: ranks, shapes, dtypes or devices that do not fit.
        Unsupported: a device without an implementation.

    Example:
        >>> import torch
        >>> one, two, lse = torch.ones(1, 1, 1), torch.full((1, 1, 1), 2.0), torch.zeros(1, 1)
        >>> merge_states(one, lse, two, lse)[0].item()
        1.5
    """
    results = run(
        MergeCall(
            out_a=out_a,
            lse_a=lse_a,
            out_b=out_b,
            lse_b=lse_b,
            out=out,
            lse=lse,
            out_scale=out_scale,
            out_dtype=None if out_dtype is None else dtype_name(out_dtype),
            num_tokens_a=num_tokens_a,
        )
    )
    return results["out"], results["lse"]
