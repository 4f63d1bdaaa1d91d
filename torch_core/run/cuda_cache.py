"""The cache operations and the state merge on torch tensors, through their plans."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_core.attention.merge.plan import plan_merge_states
from torch_core.blocks.copy.plan import plan_copy_blocks
from torch_core.blocks.write.plan import plan_write_kv_cache, plan_write_kv_cache_per_token_head
from torch_core.errors import InvalidInput
from torch_core.plan.operands import ScaleSpec
from torch_core.plan.plan import ArraySpec
from torch_core.run.launch import array_spec, dtype_name, run_operation

__all__ = ["copy_blocks", "merge_states", "write_kv_cache"]

_Scale = float | torch.Tensor | None


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    *,
    k_scale: _Scale = None,
    v_scale: _Scale = None,
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
) -> None:
    """Writes keys and values at their slots, in place; the plans are in `torch_core.blocks.write.plan`.

    Args:
        key: [num_tokens or more, num_kv_heads, head_size].
        value: the same.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], or a pair of a key cache
            [num_blocks, block_size, num_kv_heads, head_size] and a value cache; written in place.
        slot_mapping: int32 or int64 [num_tokens]; -1 writes nothing.
        k_scale: stored key * k_scale = key; a number or a one-element float32 tensor.
        v_scale: the same for values.
        k_scale_cache: float32 [num_blocks, block_size, num_kv_heads]; when given, keys are quantised with a scale per
            token and head, which is written here.
        v_scale_cache: the same for values.

    Raises:
        InvalidInput: shapes, dtypes or strides do not fit together, or both kinds of scale are given.
        Unsupported: scale caches with a cache that is not int8 or fp8.
    """
    if (k_scale_cache is None) != (v_scale_cache is None):
        raise InvalidInput("k_scale_cache and v_scale_cache go together; give both or none.")
    if slot_mapping.shape[0] == 0:
        return
    tensors = {"key": key, "value": value, "slot_mapping": slot_mapping}
    if isinstance(kv_cache, torch.Tensor):
        tensors["kv_cache"] = kv_cache
        caches = array_spec(kv_cache)
    else:
        tensors["key_cache"], tensors["value_cache"] = kv_cache
        caches = (array_spec(kv_cache[0]), array_spec(kv_cache[1]))
    new = (array_spec(key), array_spec(value))
    slots = array_spec(slot_mapping)
    if k_scale_cache is None or v_scale_cache is None:
        scales = (_scale("k_scale", k_scale, tensors), _scale("v_scale", v_scale, tensors))
        plan = plan_write_kv_cache(*new, caches, slots, *scales)
    else:
        if k_scale is not None or v_scale is not None:
            raise InvalidInput(
                "k_scale and k_scale_cache (or v_scale and v_scale_cache) are both given; pass one kind."
            )
        tensors["k_scale_cache"], tensors["v_scale_cache"] = k_scale_cache, v_scale_cache
        scale_caches = (array_spec(k_scale_cache), array_spec(v_scale_cache))
        plan = plan_write_kv_cache_per_token_head(*new, caches, *scale_caches, slots)
    run_operation(plan, tensors)


def copy_blocks(kv_caches: torch.Tensor | Sequence[torch.Tensor], block_mapping: torch.Tensor) -> None:
    """Copies whole blocks inside each layer's cache, in place; see `torch_core.plan.copy.plan_copy_blocks`.

    Args:
        kv_caches: one cache array, or one per layer.
        block_mapping: int32 [num_pairs, 2] of (source, target) on the caches' device; no target is another pair's
            source or target. A negative id skips the pair.
    """
    if block_mapping.shape[0] == 0:
        return
    for kv_cache in [kv_caches] if isinstance(kv_caches, torch.Tensor) else kv_caches:
        plan = plan_copy_blocks(array_spec(kv_cache), array_spec(block_mapping))
        run_operation(plan, {"block_mapping": block_mapping, "kv_cache": kv_cache})


def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: _Scale = None,
    num_tokens_a: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two partial attention results over disjoint keys; see `torch_core.plan.merge.plan_merge_states`.

    Args:
        out_a: [num_tokens, num_heads, head_size].
        lse_a: float32 [num_tokens, num_heads], natural log; -inf or +inf for an empty state.
        out_b: as out_a.
        lse_b: as lse_a.
        out: where to put the result; allocated when None.
        lse: where to put the merged lse; allocated when None.
        out_dtype: dtype of an allocated result, out_a's when None.
        out_scale: the result is divided by it before it is stored (fp8 output).
        num_tokens_a: tokens from this one on have no first state.

    Returns:
        The merged output and lse.
    """
    tensors = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    given = {name: tensor for name, tensor in (("out", out), ("lse", lse)) if tensor is not None}
    out_spec = None if out_dtype is None else ArraySpec(tuple(out_b.shape), dtype_name(out_dtype))
    plan = plan_merge_states(
        *[array_spec(tensor) for tensor in tensors.values()],
        out=out_spec if out is None else array_spec(out),
        lse=None if lse is None else array_spec(lse),
        out_scale=_scale("out_scale", out_scale, tensors),
        num_tokens_a=num_tokens_a,
    )
    if out_b.shape[0] == 0:
        empty = torch.empty(out_b.shape, dtype=out_dtype or out_a.dtype, device=out_b.device)
        return given.get("out", empty), given.get("lse", torch.empty_like(lse_b))
    results = run_operation(plan, tensors, given)
    return results["out"], results["lse"]


def _scale(name: str, scale: _Scale, tensors: dict[str, torch.Tensor]) -> ScaleSpec:
    if not isinstance(scale, torch.Tensor):
        return scale
    tensors[name] = scale
    return array_spec(scale)
