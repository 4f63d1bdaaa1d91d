"""MergeCall: two attention results over disjoint keys become the result over their union."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Float32

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import FP8_DTYPES, QUERY_DTYPES, ArraySpec
from torch_core.launch.call import A, Call, dtype_name


@dataclass(frozen=True, kw_only=True)
class MergeCall(Call[A]):
    """The merge of two partial results by their log-sum-exps (FlashDecoding; FlashInfer, arXiv 2501.01005).

    A state with lse -inf (or +inf) is empty and its output is not read; two empty states give zeros and -inf.

    Attributes:
        out_a: the output over the first keys.
        lse_a: its natural log-sum-exp.
        out_b: the output over the other keys.
        lse_b: its natural log-sum-exp.
        out: array of the result; it may be `out_a` or `out_b`. None allocates a new one.
        lse: array of the merged log-sum-exp; None allocates a new one.
        out_scale: scale of an fp8 output, which then holds `result / out_scale`, saturated.
        out_dtype: element type of a new output; that of `out_a` when None.
        num_tokens_a: tokens from this one on have no first state; None means that all have one.
    """

    name: ClassVar[str] = "merge_states"

    out_a: Float[A, "num_tokens num_heads head_size"]
    lse_a: Float[A, "num_tokens num_heads"]
    out_b: Float[A, "num_tokens num_heads head_size"]
    lse_b: Float[A, "num_tokens num_heads"]
    out: Float[A, "num_tokens num_heads head_size"] | None = None
    lse: Float32[A, "num_tokens num_heads"] | None = None
    out_scale: Float32[A, "1"] | float | None = None
    out_dtype: str | None = None
    num_tokens_a: int | None = None

    @property
    def result_dtype(self) -> str:
        """Element type of the output, whether it is given or new."""
        return dtype_name(self.out) if self.out is not None else self.out_dtype or dtype_name(self.out_a)

    @property
    def is_empty(self) -> bool:
        """Whether there is no token."""
        return self.out_a.shape[0] == 0

    @property
    def work(self) -> int:
        """The elements of a state."""
        return self.out_a.size

    @property
    def written(self) -> tuple[str, ...]:
        """The given results."""
        return tuple(name for name in ("out", "lse") if getattr(self, name) is not None)

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `out` and `lse`, as far as they are not given."""
        new = {
            "out": ArraySpec(tuple(self.out_a.shape), self.result_dtype),
            "lse": ArraySpec(tuple(self.lse_a.shape), dtype_name(self.lse_a)),
        }
        return {name: spec for name, spec in new.items() if name not in self.written}

    def check_options(self) -> None:
        """Checks the dtypes that go together."""
        dtype = dtype_name(self.out_a)
        if dtype not in (*QUERY_DTYPES, "float64") or dtype_name(self.out_b) != dtype:
            wanted = "both must be float32, bfloat16 or float16"
            raise InvalidInput("out_a", f"is {dtype} and out_b {dtype_name(self.out_b)}", wanted)
        wanted = "float64" if dtype == "float64" else "float32"
        for name, lse in (("lse_a", self.lse_a), ("lse_b", self.lse_b)):
            if dtype_name(lse) != wanted:
                raise InvalidInput(name, f"is {dtype_name(lse)}", f"it must be {wanted}")
        if self.out_scale is not None and self.result_dtype not in FP8_DTYPES:
            wanted = "a scale is for an fp8 output: pass an fp8 out, or out_dtype"
            raise InvalidInput("out", f"is {self.result_dtype} and out_scale is given", wanted)
