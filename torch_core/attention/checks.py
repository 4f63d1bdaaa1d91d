"""Checks that attention and writes to a cache share: forms of a cache, its scales, static bounds."""

from __future__ import annotations

from typing import Any

from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import FP8_DTYPES, QUERY_DTYPES
from torch_core.launch.call import A


def cache_fields(kv_cache: A | tuple[A, A]) -> dict[str, Any]:
    """Returns the fields of a call for a cache as the public functions take it: one array, or a pair."""
    if not isinstance(kv_cache, tuple):
        return {"kv_cache": kv_cache}
    if len(kv_cache) != 2:
        raise InvalidInput(f"kv_cache is a tuple of {len(kv_cache)}; a pair is a key cache and a value cache.")
    return {"key_cache": kv_cache[0], "value_cache": kv_cache[1]}


def check_static(name: str, size: int) -> None:
    """Raises InvalidInput unless a bound is a plain int from 0 on: not a tracer, not an array."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InvalidInput(f"{name} is {size!r}; it must be a static int, 0 or more.")


def check_caches(kv_cache: object, key_cache: object, value_cache: object) -> None:
    """Raises InvalidInput unless a cache is one array or a pair."""
    if (kv_cache is None) == (key_cache is None) or (key_cache is None) != (value_cache is None):
        raise InvalidInput("kv_cache must be one array, or a pair of a key cache and a value cache.")


def check_token_scales(k_cache: object, v_cache: object, k_scale: object, v_scale: object, dtype: str) -> None:
    """Checks scales per token and head: both, without scales per tensor, for an 8-bit cache.

    Raises:
        InvalidInput: one of them alone, or both kinds of scale.
        Unsupported: the elements of the cache are the real values.
    """
    if k_cache is None and v_cache is None:
        return
    if k_cache is None or v_cache is None:
        raise InvalidInput("k_scale_cache and v_scale_cache go together; give both or none.")
    if k_scale is not None or v_scale is not None:
        raise InvalidInput("k_scale or v_scale is given beside k_scale_cache and v_scale_cache; pass one kind.")
    if dtype not in (*FP8_DTYPES, "int8"):
        raise Unsupported(f"the cache is {dtype}; scales per token and head need int8 or fp8.")


def check_output(out: Any, shape: tuple[int, ...], result_dtype: str, out_dtype: str | None, out_scale: object) -> None:
    """Raises InvalidInput unless a given output has the shape and out_dtype, and a scale an fp8 output."""
    if result_dtype not in (*QUERY_DTYPES, *FP8_DTYPES, "float64"):
        raise InvalidInput(f"out is {result_dtype}; it must be float32, bfloat16, float16 or fp8.")
    if out is not None:
        if tuple(out.shape) != shape:
            raise InvalidInput(f"out has shape {list(out.shape)}; it must be {list(shape)}.")
        if out_dtype not in (None, result_dtype):
            raise InvalidInput(f"out is {result_dtype} and out_dtype {out_dtype}; give one of them.")
    if out_scale is not None and result_dtype not in FP8_DTYPES:
        wanted = "a scale is for an fp8 output: pass an fp8 out, or out_dtype"
        raise InvalidInput(f"out is {result_dtype} and out_scale is given; {wanted}.")


def even_axes(num_seqs: int, **axes: tuple[int, int | None]) -> dict[str, int]:
    """Returns the longest of (rows, longest) for each axis that all sequences of that length fill."""
    return {axis: longest for axis, (rows, longest) in axes.items() if longest and 0 < rows == num_seqs * longest}
