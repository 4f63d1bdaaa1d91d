"""CausalConvCall: the short convolution of layers with a state, over ragged sequences that each have a state slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Int32

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import QUERY_DTYPES, ArraySpec
from torch_core.launch.call import A, Call, dtype_name
from torch_core.launch.values import check_starts

#: The activations of the convolution, with the names of Hugging Face's `hidden_act`; None is the identity.
ACTIVATIONS = (None, "silu")
_WIDTHS = (2, 4)


@dataclass(frozen=True, kw_only=True)
class CausalConvCall(Call[A]):
    """A causal depthwise convolution (Mamba, Gu and Dao 2023, arXiv:2312.00752) with its state.

    `out[t] = activation(bias + sum over k of weight[:, k] * x[t - (width - 1) + k])` for each channel, in float32.
    Tokens before a sequence's first row are its state: the last `width - 1` inputs of the sequence, the oldest first,
    or zeros. One call takes prompts, chunks of prompts and decoded tokens together. The states are those of vLLM's
    `causal_conv1d_fn` and `causal_conv1d_update`, with the channels last.

    Attributes:
        x: new tokens of all sequences, one sequence after the other; rows after the last sequence are padding.
        weight: the weights of each channel, the last one for the token itself; the width is from 2 to 4.
        query_start_loc: first row of each sequence, and the end of the last one.
        bias: bias of each channel; None for none.
        conv_states: a state in each slot; those of sequences with tokens are replaced, in place. None if every
            sequence starts from zeros and no state is kept.
        cache_indices: slot of each sequence; a negative one is no slot: the sequence starts from zeros and its state
            is not kept. No two sequences with tokens share a slot. None for slot i for sequence i.
        has_initial_state: whether a sequence starts from the state in its slot; if False, from zeros, and the slot
            is not read. None for True.
        activation: None or "silu".
        out: array of the results, not `x`; None allocates a new one. Rows of padding are 0.
    """

    name: ClassVar[str] = "causal_conv1d"

    x: Float[A, "num_tokens num_channels"]
    weight: Float[A, "num_channels width"]
    query_start_loc: Int32[A, "num_seqs+1"]
    bias: Float[A, "num_channels"] | None = None
    conv_states: Float[A, "num_states state_len num_channels"] | None = None
    cache_indices: Int32[A, "num_seqs"] | None = None
    has_initial_state: Bool[A, "num_seqs"] | None = None
    activation: str | None = None
    out: Float[A, "num_tokens num_channels"] | None = None

    @property
    def width(self) -> int:
        """Tokens that an output sees."""
        return self.weight.shape[1]

    @property
    def num_seqs(self) -> int:
        """Sequences, those without tokens too."""
        return self.query_start_loc.shape[0] - 1

    @property
    def is_empty(self) -> bool:
        """Whether there is no token, or no sequence."""
        return self.x.shape[0] == 0 or self.num_seqs == 0

    @property
    def written(self) -> tuple[str, ...]:
        """The states, and the results if they are given a place."""
        return tuple(name for name in ("conv_states", "out") if getattr(self, name) is not None)

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `out`, unless it is given."""
        return {} if self.out is not None else {"out": ArraySpec(tuple(self.x.shape), dtype_name(self.x))}

    @property
    def work(self) -> int:
        """The products."""
        return self.x.size * self.width

    def check_values(self, *, more_queries: bool = False) -> None:
        """Checks offsets and slots."""
        lens = check_starts("query_start_loc", self.query_start_loc, self.x.shape[0], rows_in="x")
        if self.conv_states is None or self.cache_indices is None:
            return
        num_states, owners = self.conv_states.shape[0], {}
        for seq, slot in enumerate(self.cache_indices.tolist()):
            if slot >= num_states:
                raise InvalidInput(
                    f"cache_indices[{seq}]", value=slot, wanted=f"conv_states has slots 0 to {num_states - 1}"
                )
            if slot >= 0 and lens[seq] > 0 and owners.setdefault(slot, seq) != seq:
                raise InvalidInput(
                    f"cache_indices[{seq}]", f"is {slot}, the slot of sequence {owners[slot]} too", "give each its own"
                )

    def check_options(self) -> None:
        """Checks the width, the states' form, and the dtypes that go together."""
        least, most = _WIDTHS
        if not least <= self.width <= most:
            raise InvalidInput("weight", f"has width {self.width}", f"it must be from {least} to {most}")
        if self.x.shape[1] == 0:
            raise InvalidInput("x", "has no channel", "there must be at least one")
        if self.activation not in ACTIVATIONS:
            raise InvalidInput("activation", value=self.activation, wanted="it must be None or 'silu'")
        self._check_states()
        dtype = dtype_name(self.x)
        for name in ("x", "weight", "bias", "conv_states"):
            array = getattr(self, name)
            if array is not None and dtype_name(array) not in (*QUERY_DTYPES, dtype if dtype == "float64" else ""):
                raise InvalidInput(
                    name, f"is {dtype_name(array)}", "it must be float32, bfloat16 or float16, or float64 with x"
                )
        if self.out is not None and dtype_name(self.out) != dtype:
            raise InvalidInput("out", f"is {dtype_name(self.out)}", f"it must be {dtype}, as x is")

    def _check_states(self) -> None:
        if self.conv_states is None:
            for name in ("cache_indices", "has_initial_state"):
                if getattr(self, name) is not None:
                    raise InvalidInput(name, "is given without conv_states", "give both or neither")
            return
        num_states, state_len, _ = self.conv_states.shape
        if state_len != self.width - 1:
            raise InvalidInput(
                "conv_states", f"holds {state_len} tokens in a slot", f"a width of {self.width} needs {self.width - 1}"
            )
        if self.cache_indices is None and num_states < self.num_seqs:
            raise InvalidInput(
                "conv_states", f"has {num_states} slots for {self.num_seqs} sequences", "give cache_indices"
            )
