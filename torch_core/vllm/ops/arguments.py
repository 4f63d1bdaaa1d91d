"""Arguments as vLLM passes them: integers of 64 bits, and scales of a tensor, of heads, or of sequences and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_core.attention.call import PagedCall
from torch_core.base.checks import INT32_MAX
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.ops import run
from torch_core.vllm.types import CACHE_DTYPES

Scale = Tensor | float | None


def as_int32(name: str, values: Tensor) -> Tensor:
    """Returns integers as int32, or raises InvalidInput; negative ones, which mean nothing at all, stay negative.

    On a CPU, if values are checked, a number that does not fit is refused: truncated to 32 bits it would be another
    slot, block or length. On CUDA the caller is responsible for it, as for every value.
    """
    if values.dtype == torch.int32:
        return values
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise InvalidInput(name, f"is {values.dtype}", "it must hold integers")
    if values.device.type == "cpu":
        wide = (values > INT32_MAX).nonzero()
        if len(wide):
            first = wide[0].tolist()
            raise InvalidInput(f"{name}{first}", f"is {values[tuple(first)].item()}", "it must fit an int32")
        values = values.clamp(min=-INT32_MAX)
    return values.to(torch.int32)


def one_scale(name: str, scale: Scale) -> Scale:
    """Returns a scale of a whole tensor: a number, one element, or a view that repeats one; Unsupported for others."""
    if isinstance(scale, Tensor) and not _is_one(scale):
        raise Unsupported(name, f"has shape {list(scale.shape)}", "one element, or a view that repeats it, is served")
    return scale.as_strided((1,), (1,)).to(torch.float32) if isinstance(scale, Tensor) else scale


def run_descaled(call: PagedCall[Tensor], out: Tensor, *, q_descale: Scale, k_descale: Scale, v_descale: Scale) -> None:
    """Runs a call without scales into `out`; descales may be numbers, or broadcast to float [num_seqs, num_kv_heads].

    The kernels know one scale for a tensor. Scores are linear in the query and results in the values, so scales per
    sequence and head are multiplied into the query (which is rounded once more, an fp8 query to bfloat16) and into a
    float32 result.
    """
    shape = call.num_seqs, call.num_kv_heads
    q_one, q_each = _one_or_each("q_descale", q_descale, shape)
    k_one, k_each = _one_or_each("k_descale", k_descale, shape)
    v_one, v_each = _one_or_each("v_descale", v_descale, shape)
    if call.is_empty:
        q_each = k_each = v_each = None
    if q_each is not None or k_each is not None:
        each = torch.ones(shape, device=out.device) * (1.0 if q_each is None else q_each)
        each *= 1.0 if k_each is None else k_each
        # Only ratios go into the query, so that 16 bits neither lose nor exceed them; the kernel has the rest.
        largest = each.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
        wide = torch.bfloat16 if call.query.dtype.itemsize == 1 else call.query.dtype
        call = replace(call, query=(call.query.float() * _rows(call, each / largest)).to(wide))
        whole = largest * (1.0 if q_one is None else q_one) * (1.0 if k_one is None else k_one)
        q_one, k_one = None, whole.reshape(1)
    call = replace(call, q_scale=q_one, k_scale=k_one, v_scale=v_one)
    if v_each is None:
        run(replace(call, out=out))
        return
    found = run(replace(call, out_dtype="float32", out_scale=None))["out"] * _rows(call, v_each)
    if call.out_scale is not None:
        found /= call.out_scale
    if out.dtype.itemsize == 1:
        found.clamp_(torch.finfo(out.dtype).min, torch.finfo(out.dtype).max)
    out.copy_(found)


def check_shape(name: str, array: Tensor, shape: Sequence[int]) -> None:
    """Raises InvalidInput for an array of another shape."""
    if tuple(array.shape) != tuple(shape):
        raise InvalidInput(name, f"has shape {list(array.shape)}", f"it must be {list(shape)}")


def as_stored(name: str, rows: Tensor, scale: Scale, dtype: torch.dtype) -> tuple[Tensor, Scale]:
    """Returns rows and their scale for a write to a cache of `dtype`; a scale for each head is divided out here."""
    heads = rows.shape[1]
    if not isinstance(scale, Tensor) or _is_one(scale) or scale.numel() != heads:
        return rows, one_scale(name, scale)
    # Codes of the cache's own type are stored as they are.
    return (rows if rows.dtype == dtype else rows.float() / scale.float().reshape(heads, 1)), None


def stored_dtype(kv_cache_dtype: str) -> torch.dtype | None:
    """Returns the fp8 type of a cache's bytes; None when its elements are the real values."""
    names = {**CACHE_DTYPES, "half": torch.float16, "float": torch.float32}
    del names["int8"]
    if kv_cache_dtype not in names:
        wanted = f"use one of {', '.join(names)}, or the per-token-head operation"
        raise Unsupported("kv_cache_dtype", value=kv_cache_dtype, wanted=wanted)
    dtype = names[kv_cache_dtype]
    return dtype if dtype is not None and dtype.itemsize == 1 else None


def refuse_option(name: str, value: object, default: object, wanted: str) -> None:
    """Raises Unsupported for another value than vLLM's default of an argument without a counterpart here."""
    if value != default:
        raise Unsupported(name, value=value, wanted=f"{wanted}: use {default}")


def refuse_4_bits(kv_quant_mode: Any) -> None:
    """Raises Unsupported for vLLM's 4-bit modes."""
    if "INT4" in str(getattr(kv_quant_mode, "name", kv_quant_mode)):
        raise Unsupported("kv_quant_mode", f"is {kv_quant_mode}", "caches are 8-bit or wider: use int8 or fp8")


def sequence_of_token(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """Returns int64 [num_tokens]: the sequence of each token; tokens of padding count for the last one."""
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype, device=query_start_loc.device)
    found = torch.searchsorted(query_start_loc[1:].contiguous(), tokens, right=True)
    return found.clamp(max=max(query_start_loc.shape[0] - 2, 0))


def _rows(call: PagedCall[Tensor], each: Tensor) -> Tensor:
    """Spreads [num_seqs, num_kv_heads] over [num_tokens, num_heads, 1]."""
    sequence = sequence_of_token(call.query_start_loc, call.num_tokens)
    return each[sequence].repeat_interleave(call.group, dim=1).unsqueeze(-1)


def _is_one(scale: Tensor) -> bool:
    """Says whether all elements are one, as far as that can be seen without reading them."""
    return not any(stride for stride, size in zip(scale.stride(), scale.shape, strict=True) if size > 1)


def _one_or_each(name: str, scale: Scale, shape: tuple[int, int]) -> tuple[Scale, Tensor | None]:
    if not isinstance(scale, Tensor) or _is_one(scale):
        return one_scale(name, scale), None
    try:
        return None, scale.float().broadcast_to(shape)
    except RuntimeError:
        wanted = f"it must be one element, or [num_seqs, num_kv_heads], {list(shape)}"
        raise InvalidInput(name, f"has shape {list(scale.shape)}", wanted) from None
