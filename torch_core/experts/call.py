"""ExpertsCall: tokens through the experts that a router chose for them, and the weighted sum of the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int32

from torch_core.base.checks import check_bool
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import A, Call, check_one_dtype, dtype_name

#: Activations of the gate, with the names of Hugging Face's `hidden_act`. "swigluoai" is gpt-oss's (arXiv:2508.10925):
#: a clamped gate with the sigmoid's slope of GELU, and 1 added to the gated values.
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "swigluoai")


@dataclass(frozen=True, kw_only=True)
class ExpertsCall(Call[A]):
    """A feed-forward layer for each expert (Shazeer et al. 2017, arXiv:1701.06538), no token dropped.

    `out[t] = sum over k of topk_weights[t, k] * down(act(gate(hidden_states[t])) * up(hidden_states[t]))` with the
    kernels of expert `topk_ids[t, k]`, or of `down(act(up(hidden_states[t])))` without a gate. An id outside the
    experts adds nothing: it belongs to another device, or the row is padding.

    Low-rank adapters of experts take two calls of `LoraCall` around this one: `gate_up_added` are the products of the
    first, and `activated` are the inputs of the second, whose products are added to `out` afterwards.

    Attributes:
        hidden_states: one row for each token.
        topk_weights, topk_ids: weights and ids of each token's experts.
        gate_up_kernel: weights `[in, gate | up]` of each expert, or up alone, as many columns as `down_kernel` rows.
        down_kernel: weights `[in, out]` of each expert.
        gate_up_bias, down_bias: biases added after the kernels; None for none.
        gate_up_added: added to the results of `gate_up_kernel` of each token and expert; None for nothing.
        activation: activation of the gate, or of up alone; one of ACTIVATIONS, "swigluoai" with a gate.
        out_dtype: element type of the result; that of `hidden_states` when None, or float32.
        with_activated: return `activated`, too: the inputs of `down_kernel` of each token and expert. Those of ids
            outside the experts hold anything.
    """

    name: ClassVar[str] = "fused_experts"

    hidden_states: Float[A, "num_tokens hidden_size"]
    topk_weights: Float[A, "num_tokens top_k"]
    topk_ids: Int32[A, "num_tokens top_k"]
    gate_up_kernel: Float[A, "num_experts hidden_size gate_up_size"]
    down_kernel: Float[A, "num_experts intermediate_size hidden_size"]
    gate_up_bias: Float[A, "num_experts gate_up_size"] | None = None
    down_bias: Float[A, "num_experts hidden_size"] | None = None
    gate_up_added: Float[A, "num_tokens top_k gate_up_size"] | None = None
    activation: str = "silu"
    out_dtype: str | None = None
    with_activated: bool = False

    @property
    def is_gated(self) -> bool:
        """Experts have a gate."""
        return self.gate_up_kernel.shape[2] == 2 * self.down_kernel.shape[1]

    @property
    def num_experts(self) -> int:
        """Experts that have kernels here."""
        return self.down_kernel.shape[0]

    @property
    def num_pairs(self) -> int:
        """Pairs of a token and one of its experts."""
        return self.topk_ids.shape[0] * self.topk_ids.shape[1]

    @property
    def result_dtype(self) -> str:
        """Element type of the output."""
        return self.out_dtype or dtype_name(self.hidden_states)

    @property
    def is_empty(self) -> bool:
        """Whether there is no token, or none has an expert."""
        return self.num_pairs == 0

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `out`, a row for each token, and `activated`."""
        outputs = {"out": ArraySpec(tuple(self.hidden_states.shape), self.result_dtype)}
        if self.with_activated:
            shape = (*self.topk_ids.shape, self.down_kernel.shape[1])
            outputs["activated"] = ArraySpec(shape, dtype_name(self.hidden_states))
        return outputs

    def check_statics(self) -> None:
        """Checks the option that is a flag."""
        check_bool("with_activated", self.with_activated)

    def check_options(self) -> None:
        """Checks sizes and the dtypes that go together."""
        inner, gate_up = self.down_kernel.shape[1], self.gate_up_kernel.shape[2]
        if gate_up not in (inner, 2 * inner):
            wanted = f"they must be gate and up of down_kernel's {inner} rows, {2 * inner}, or up alone"
            raise InvalidInput("gate_up_kernel", f"has {gate_up} columns", wanted)
        if 0 in (*self.gate_up_kernel.shape, *self.down_kernel.shape):
            wanted = "there must be at least one expert, and no size may be 0"
            raise InvalidInput("gate_up_kernel", f"has shape {list(self.gate_up_kernel.shape)}", wanted)
        dtype = check_one_dtype(self, "hidden_states")
        wide = "float64" if dtype == "float64" else "float32"
        for name, array in self.arrays().items():
            wanted = {"topk_weights": wide, "topk_ids": "int32"}.get(name, dtype)
            if dtype_name(array) != wanted:
                raise InvalidInput(name, f"is {dtype_name(array)}", f"beside hidden_states of {dtype} it is {wanted}")
        if self.activation not in ACTIVATIONS:
            raise InvalidInput("activation", value=self.activation, wanted=f"use one of {', '.join(ACTIVATIONS)}")
        if self.activation == "swigluoai" and not self.is_gated:
            raise InvalidInput("activation", value=self.activation, wanted="experts without a gate have another one")
        if self.result_dtype not in (dtype, "float32"):
            raise InvalidInput("out_dtype", value=self.out_dtype, wanted=f"it must be None, {dtype!r} or 'float32'")
