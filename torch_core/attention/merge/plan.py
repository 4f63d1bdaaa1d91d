"""The plan of the merge of two partial attention results."""

from __future__ import annotations

from functools import lru_cache

from torch_core.attention.merge.kernel import merge_states_kernel
from torch_core.errors import InvalidInput
from torch_core.plan.operands import (
    ScaleSpec,
    ceil_div,
    check_last_stride,
    power_of_two,
    scale_inputs,
    scale_pointer,
    scale_value,
)
from torch_core.plan.plan import Argument, ArraySpec, LaunchPlan, OperationPlan, Pointer, Scalar

__all__ = ["plan_merge_states"]


@lru_cache(maxsize=1024)
def plan_merge_states(
    out_a: ArraySpec,
    lse_a: ArraySpec,
    out_b: ArraySpec,
    lse_b: ArraySpec,
    *,
    out: ArraySpec | None = None,
    lse: ArraySpec | None = None,
    out_scale: ScaleSpec = None,
    num_tokens_a: int | None = None,
) -> OperationPlan:
    """Plans the merge of two partial attention results over disjoint keys.

    Buffers: out_a, lse_a, out_b, lse_b, [out_scale], then the outputs out and lse. A state with lse -inf (or +inf) is
    empty and its output is not read; two empty states give 0 and -inf. With an fp8 `out`, the result is divided by
    `out_scale` and saturated.

    Args:
        out_a: [num_tokens, num_heads, head_size], any strides with the last one 1.
        lse_a: float32 [num_tokens, num_heads], natural log, any strides.
        out_b: as out_a.
        lse_b: as lse_a.
        out: what to return; as out_a, contiguous, when None.
        lse: the same for the merged lse.
        out_scale: what one unit of the stored output is worth.
        num_tokens_a: tokens from this one on have no first state; None means that all have one.

    Raises:
        InvalidInput: shapes, dtypes or strides do not fit together.
    """
    if len(out_b.shape) != 3:
        raise InvalidInput(f"out_b has shape {list(out_b.shape)}; it must be [num_tokens, num_heads, head_size].")
    num_tokens, num_heads, head_size = out_b.shape
    out = out or ArraySpec(out_b.shape, out_a.dtype)
    lse = lse or ArraySpec((num_tokens, num_heads), "float32")
    for name, array in (("out_a", out_a), ("out", out)):
        if array.shape != out_b.shape:
            raise InvalidInput(f"{name} has shape {list(array.shape)} and out_b {list(out_b.shape)}; they must agree.")
    for name, array in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if array.shape != out_b.shape[:2] or array.dtype != "float32":
            raise InvalidInput(
                f"{name} is {array.dtype}{list(array.shape)}; it must be float32{list(out_b.shape[:2])}."
            )
    for name, array in (("out_a", out_a), ("out_b", out_b), ("out", out)):
        check_last_stride(name, array)
    padded = power_of_two(head_size)
    rows = max(1, min(16, 2048 // padded))
    limit = num_tokens if num_tokens_a is None else num_tokens_a
    arguments: list[tuple[str, Argument]] = [
        ("out_a", Pointer("out_a")),
        ("lse_a", Pointer("lse_a")),
        ("out_b", Pointer("out_b")),
        ("lse_b", Pointer("lse_b")),
        ("out_scale", scale_pointer("out_scale", out_scale)),
        ("out", Pointer("out")),
        ("lse", Pointer("lse")),
        ("out_scale_value", scale_value(out_scale)),
        ("num_rows", Scalar(num_tokens * num_heads, "i64", specialize=False)),
        ("num_tokens_a", Scalar(limit, "i32", specialize=False)),
    ]
    for name, array in (
        ("out_a", out_a),
        ("out_b", out_b),
        ("lse_a", lse_a),
        ("lse_b", lse_b),
        ("out", out),
        ("lse", lse),
    ):
        arguments.append((f"{name}_token_stride", Scalar(array.element_strides[0], "i64")))
        arguments.append((f"{name}_head_stride", Scalar(array.element_strides[1], "i64")))
    launch = LaunchPlan(
        kernel=merge_states_kernel,
        grid=(max(1, ceil_div(num_tokens * num_heads, rows)),),
        arguments=tuple(arguments),
        constexprs=(
            ("NUM_HEADS", num_heads),
            ("HEAD_SIZE", head_size),
            ("PADDED_HEAD_SIZE", padded),
            ("ROWS", rows),
            ("HAS_SCALE", out_scale is not None),
        ),
        writes=("out", "lse"),
        num_warps=4,
        num_stages=1,
        hot=True,
    )
    states = (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b))
    return OperationPlan(
        name="merge_states",
        inputs=states + scale_inputs(out_scale=out_scale),
        outputs=(("out", out), ("lse", lse)),
        launches=(launch,),
    )
