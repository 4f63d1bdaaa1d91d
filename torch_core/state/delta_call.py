"""GatedDeltaCall: the delta rule with a gate for each head or each key channel, over ragged sequences with states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float

from torch_core.base.checks import check_bool, check_int, check_positive
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import A, dtype_name
from torch_core.state.call import StateCall

#: Added to the squares of a row before its norm is taken, as in flash-linear-attention.
L2NORM_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class GatedDeltaCall(StateCall[A]):
    """The gated delta rule (Yang et al. 2024, arXiv:2412.06464), and Kimi Delta Attention (arXiv:2510.26692).

    For each token and head the state S, a matrix from keys to values, becomes `S = S * exp(gate)` and then
    `S = S + beta * (value - S key) key^T`; the result is `scale * S query`. Gates are logarithms, at most 0: one of a
    head (`g`) or one of each key channel (`gk`). All is computed in float32. One call takes prompts, chunks of prompts
    and decoded tokens together.

    Attributes:
        query: one row for each token; a query and key head serves as many neighbouring value heads as the group has.
        key: keys, likewise.
        value: values; their heads are those of the states.
        beta: step size of each token and head, from 0 to 2.
        g: logarithm of the decay of each token and head; None for none.
        gk: logarithm of the decay of each token, head and key channel, in the place of `g`; None for none.
        states: a state in each slot, keys along the last axis; those of sequences with tokens are replaced, in place.
            None if every sequence starts from zeros and no state is kept.
        max_query_len: at least the number of rows of the longest sequence; the choice of the kernel depends on it.
        scale: factor of the results.
        use_qk_l2norm_in_kernel: queries and keys are divided by their norms, `sqrt(sum of squares + 1e-6)`.
        out: array of the results; None allocates a new one. Rows of padding are 0.
    """

    name: ClassVar[str] = "gated_delta_rule"
    tokens_in: ClassVar[str] = "query"
    states_in: ClassVar[str] = "states"

    query: Float[A, "num_tokens num_kv_heads key_size"]
    key: Float[A, "num_tokens num_kv_heads key_size"]
    value: Float[A, "num_tokens num_heads value_size"]
    beta: Float[A, "num_tokens num_heads"]
    g: Float[A, "num_tokens num_heads"] | None = None
    gk: Float[A, "num_tokens num_heads key_size"] | None = None
    states: Float[A, "num_states num_heads value_size key_size"] | None = None
    max_query_len: int
    scale: float
    use_qk_l2norm_in_kernel: bool = False
    out: Float[A, "num_tokens num_heads value_size"] | None = None

    @property
    def num_heads(self) -> int:
        """Heads of values and states."""
        return self.value.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of queries and keys."""
        return self.key.shape[1]

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of a sequence's state: heads, rows, columns."""
        return (*self.value.shape[1:], self.key.shape[2])

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `out`, unless it is given."""
        return {} if self.out is not None else {"out": ArraySpec(tuple(self.value.shape), dtype_name(self.value))}

    @property
    def work(self) -> int:
        """The products with states."""
        return 3 * self.value.size * self.key.shape[2]

    def check_statics(self) -> None:
        """Checks the numbers."""
        check_int("max_query_len", self.max_query_len, 1)
        check_bool("use_qk_l2norm_in_kernel", self.use_qk_l2norm_in_kernel)
        check_positive("scale", self.scale)

    def check_options(self) -> None:
        """Checks sizes, gates and the dtypes that go together."""
        if 0 in (*self.key.shape[1:], *self.value.shape[1:]):
            raise InvalidInput("value", f"has shape {list(self.value.shape)}", "no size of heads or elements may be 0")
        if self.num_heads % self.num_kv_heads:
            wanted = f"they must be a multiple of the {self.num_kv_heads} heads of key"
            raise InvalidInput("value", f"has {self.num_heads} heads", wanted)
        if self.g is not None and self.gk is not None:
            raise InvalidInput("gk", "is given together with g", "give one of them")
        self.check_states()
        self.check_dtypes("query", "key", "value", "beta", "g", "gk", "states")
        if self.out is not None and dtype_name(self.out) != dtype_name(self.value):
            raise InvalidInput("out", f"is {dtype_name(self.out)}", f"it must be {dtype_name(self.value)}, as value is")
