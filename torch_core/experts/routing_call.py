"""RouteCall: the experts of each token, and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Float32

from torch_core.base.checks import check_bool, check_int, check_positive
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import A, Call, check_one_dtype

#: Functions from a router's logits to scores, with the names of Hugging Face's `scoring_func`.
SCORING_FUNCS = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class RouteCall(Call[A]):
    """A router: the `top_k` experts with the largest scores of each token, the best first.

    Scores are `scoring_func(hidden_states @ kernel + bias)` in float32. Of equal ones the expert that comes first wins.

    Attributes:
        hidden_states: one row for each token.
        kernel: weights of the router, `[in, experts]`.
        bias: bias of the logits; None for none.
        correction_bias: added to the scores for the choice, but not part of the weights (DeepSeek-V3,
            arXiv:2412.19437); None for none.
        top_k: number of experts of a token.
        scoring_func: one of SCORING_FUNCS: "softmax" over all experts, or "sigmoid" of each expert.
        norm_topk_prob: normalise the weights of a token to sum 1; if False, the weights are the scores.
        routed_scaling_factor: factor of the weights.
        n_group: number of groups of neighbouring experts; a token's experts are in the best `topk_group` of them. A
            group is ranked by its best expert, or by its best two if there is a correction bias. 1 for no groups.
        topk_group: number of groups of a token.
    """

    name: ClassVar[str] = "route_experts"

    hidden_states: Float[A, "num_tokens hidden_size"]
    kernel: Float[A, "hidden_size num_experts"]
    bias: Float[A, "num_experts"] | None = None
    correction_bias: Float32[A, "num_experts"] | None = None
    top_k: int
    scoring_func: str = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1

    @property
    def num_tokens(self) -> int:
        """Rows."""
        return self.hidden_states.shape[0]

    @property
    def num_experts(self) -> int:
        """Experts to choose from."""
        return self.kernel.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether there is no token."""
        return self.num_tokens == 0

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns the weights and ids of each token's experts."""
        shape = (self.num_tokens, self.top_k)
        return {"topk_weights": ArraySpec(shape, "float32"), "topk_ids": ArraySpec(shape, "int32")}

    def check_statics(self) -> None:
        """Checks the numbers."""
        check_int("top_k", self.top_k, 1)
        check_int("n_group", self.n_group, 1)
        check_int("topk_group", self.topk_group, 1, self.n_group)
        check_positive("routed_scaling_factor", self.routed_scaling_factor)
        check_bool("norm_topk_prob", self.norm_topk_prob)

    def check_options(self) -> None:
        """Checks sizes and the dtypes that go together."""
        if 0 in self.kernel.shape:
            raise InvalidInput(f"kernel has shape {list(self.kernel.shape)}; no size of a router may be 0.")
        check_one_dtype(self, "hidden_states", "kernel", "bias")
        if self.scoring_func not in SCORING_FUNCS:
            raise InvalidInput("scoring_func", value=self.scoring_func, wanted=f"use one of {', '.join(SCORING_FUNCS)}")
        size = self.num_experts // self.n_group
        if self.num_experts % self.n_group or size < (2 if self.sums_two else 1):
            wanted = f"it must divide them into groups of at least {2 if self.sums_two else 1}"
            raise InvalidInput("n_group", f"is {self.n_group} with {self.num_experts} experts", wanted)
        if self.top_k > size * self.topk_group:
            wanted = f"{self.topk_group} groups of {size} experts have only {size * self.topk_group}"
            raise InvalidInput("top_k", f"is {self.top_k}", wanted)

    @property
    def sums_two(self) -> bool:
        """Groups are compared by their best two experts together."""
        return self.n_group > 1 and self.correction_bias is not None
