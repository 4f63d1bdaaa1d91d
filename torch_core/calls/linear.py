"""LinearCall: a linear map of a few rows, with a norm in front and an activation and a residual behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float

from torch_core.calls.call import A, Call, dtype_name
from torch_core.calls.experts import ACTIVATIONS
from torch_core.errors import InvalidInput
from torch_core.specs import QUERY_DTYPES, ArraySpec

__all__ = ["MAX_FUSED_ROWS", "LinearCall"]

#: Rows that the kernels take.
MAX_FUSED_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class LinearCall(Call[A]):
    """`residual + act(rms_norm(hidden_states) @ kernel + bias)`, with each part but the product left out where absent.

    Attributes:
        hidden_states: a row for each token.
        kernel: `[in, out]`, or `[in, gate | up]` with an activation.
        bias: what is added behind the kernel.
        norm_weight: of the root mean square norm (Zhang and Sennrich 2019, arXiv:1910.07467) of each row.
        norm_epsilon: added to the mean square.
        activation: one of ACTIVATIONS, of the gate: `act(gate) * up`.
        residual: what the result is added to, after it was rounded.
    """

    name: ClassVar[str] = "fused_linear"

    hidden_states: Float[A, "num_tokens in_size"]
    kernel: Float[A, "in_size num_columns"]
    bias: Float[A, "num_columns"] | None = None
    norm_weight: Float[A, "in_size"] | None = None
    residual: Float[A, "num_tokens out_size"] | None = None
    norm_epsilon: float = 1e-6
    activation: str | None = None

    @property
    def out_size(self) -> int:
        """Columns of the result."""
        columns = self.kernel.shape[1]
        return columns if self.activation is None else columns // 2

    @property
    def is_empty(self) -> bool:
        """There is no token."""
        return self.hidden_states.shape[0] == 0

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `out`, a row for each token."""
        shape = (self.hidden_states.shape[0], self.out_size)
        return {"out": ArraySpec(shape, dtype_name(self.hidden_states))}

    def check_statics(self) -> None:
        """Checks the number."""
        if isinstance(self.norm_epsilon, bool) or not 0 <= self.norm_epsilon < float("inf"):
            raise InvalidInput(f"norm_epsilon is {self.norm_epsilon}; it must be finite and at least 0.")

    def check_options(self) -> None:
        """Checks sizes and the dtypes that go together."""
        if 0 in self.kernel.shape:
            raise InvalidInput(f"kernel has shape {list(self.kernel.shape)}; no size of a linear map may be 0.")
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise InvalidInput(f"activation is {self.activation!r}; use None or one of {', '.join(ACTIVATIONS)}.")
        if self.activation is not None and self.kernel.shape[1] % 2:
            raise InvalidInput(f"kernel has {self.kernel.shape[1]} columns; those of gate and up must be as many.")
        if self.residual is not None and self.residual.shape[1] != self.out_size:
            raise InvalidInput(
                f"residual has shape {list(self.residual.shape)}; it must have the result's {self.out_size} columns."
            )
        dtype = dtype_name(self.hidden_states)
        if dtype not in (*QUERY_DTYPES, "float64"):
            raise InvalidInput(f"hidden_states is {dtype}; it must be float32, bfloat16 or float16. Cast it.")
        for name, array in self.arrays().items():
            if dtype_name(array) != dtype:
                raise InvalidInput(f"{name} is {dtype_name(array)}; beside hidden_states of {dtype} it is {dtype}.")
