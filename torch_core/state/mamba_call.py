"""MambaChunkScanCall: the state space model of Mamba-2, over ragged sequences that each have a state in a slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float

from torch_core.base.checks import check_bool, check_bounds, check_int
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import A as Array
from torch_core.launch.call import dtype_name
from torch_core.state.call import StateCall


@dataclass(frozen=True, kw_only=True)
class MambaChunkScanCall(StateCall[Array]):
    """The state space model of Mamba-2 (SSD; Dao and Gu 2024, arXiv:2405.21060).

    For each token and head the state S, a matrix of `head_dim` rows and `state_size` columns, becomes
    `S = exp(step * A) * S + step * x B^T`; the result is `S C + D * x`. The step is `dt + dt_bias`, or its softplus,
    within `dt_limit`. All is computed in float32. One call takes prompts, chunks of prompts and decoded tokens
    together. Fields are those of vLLM's `mamba_chunk_scan_combined_varlen`.

    Attributes:
        x: one row for each token; its heads are those of the states.
        dt: step size of each token and head, before bias and softplus.
        dt_column: the column of dt that is the first head; other columns are not read, and need no copy. None if dt has
            the heads alone.
        A: rate of each head, negative: the logarithm of the decay in a step of 1.
        log_rates: A has the logarithms of the rates without their sign, as checkpoints do.
        B: input weights of each token; a group of neighbouring heads shares them, and C.
        C: output weights, likewise.
        D: factor of x in the result of each head; None for none.
        dt_bias: bias of each head's step sizes; None for none.
        states: a state in each slot; those of sequences with tokens are replaced, in place. None if every sequence
            starts from zeros and no state is kept.
        max_query_len: at least the number of rows of the longest sequence; the choice of the kernel depends on it.
        dt_softplus: the step size is the softplus of `dt + dt_bias`.
        dt_limit: the least and the largest step size; larger and smaller ones become these.
        out: array of the results; None allocates a new one. Rows of padding are 0.
    """

    name: ClassVar[str] = "mamba_chunk_scan"
    tokens_in: ClassVar[str] = "x"
    states_in: ClassVar[str] = "states"

    x: Float[Array, "num_tokens num_heads head_dim"]
    dt: Float[Array, "num_tokens num_columns"]
    A: Float[Array, "num_heads"]
    B: Float[Array, "num_tokens num_kv_heads state_size"]
    C: Float[Array, "num_tokens num_kv_heads state_size"]
    D: Float[Array, "num_heads"] | None = None
    dt_bias: Float[Array, "num_heads"] | None = None
    states: Float[Array, "num_states num_heads head_dim state_size"] | None = None
    max_query_len: int
    dt_column: int | None = None
    log_rates: bool = False
    dt_softplus: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    out: Float[Array, "num_tokens num_heads head_dim"] | None = None

    @property
    def num_heads(self) -> int:
        """Heads of x and of the states."""
        return self.x.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Groups of heads."""
        return self.B.shape[1]

    @property
    def state_size(self) -> int:
        """Columns of a state."""
        return self.B.shape[2]

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of a sequence's state: heads, rows, columns."""
        return (*self.x.shape[1:], self.state_size)

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `out`, unless it is given."""
        return {} if self.out is not None else {"out": ArraySpec(tuple(self.x.shape), dtype_name(self.x))}

    @property
    def is_resolved(self) -> bool:
        """Whether `of_heads` changes nothing."""
        return self.dt_column is None and not self.log_rates

    def equal_axes(self) -> dict[str, str]:
        """The columns of dt are the heads, where devices split them."""
        return {"num_columns": "num_heads"}

    def of_heads(self, library: Any) -> Any:
        """Returns the call with the heads' step sizes and rates alone; `library` is `torch` or `jax.numpy`."""
        dt: Any = self.dt if self.dt_column is None else self.dt[:, self.dt_column : self.dt_column + self.num_heads]
        rates = -library.exp(self.A) if self.log_rates else self.A
        return self.of({**self.__dict__, "dt": dt, "A": rates, "dt_column": None, "log_rates": False})

    @property
    def work(self) -> int:
        """The products with states."""
        return 2 * self.x.size * self.state_size

    def check_statics(self) -> None:
        """Checks the numbers."""
        check_int("max_query_len", self.max_query_len, 1)
        check_bool("dt_softplus", self.dt_softplus)
        check_bool("log_rates", self.log_rates)
        check_bounds("dt_limit", self.dt_limit)

    def check_options(self) -> None:
        """Checks sizes and the dtypes that go together."""
        if 0 in (*self.x.shape[1:], *self.B.shape[1:]):
            raise InvalidInput("x", f"has shape {list(self.x.shape)}", "no size of heads, groups or elements may be 0")
        if self.num_heads % self.num_kv_heads:
            wanted = f"they must be a multiple of the {self.num_kv_heads} groups of B"
            raise InvalidInput("x", f"has {self.num_heads} heads", wanted)
        columns, first = self.dt.shape[1], self.dt_column
        if columns < self.num_heads or (first is None and columns != self.num_heads):
            wanted = f"it must be [tokens, heads] with num_heads = {self.num_heads}, that of x, or wider with dt_column"
            raise InvalidInput("dt", f"has shape {tuple(self.dt.shape)}", wanted)
        check_int("dt_column", 0 if first is None else first, 0, columns - self.num_heads)
        self.check_states()
        self.check_dtypes("x", "dt", "A", "B", "C", "D", "dt_bias", "states")
        if self.out is not None and dtype_name(self.out) != dtype_name(self.x):
            raise InvalidInput("out", f"is {dtype_name(self.out)}", f"it must be {dtype_name(self.x)}, as x is")
