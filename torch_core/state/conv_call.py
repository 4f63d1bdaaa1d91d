"""CausalConvCall: the short convolution of layers with a state, over ragged sequences that each have a state slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import A, dtype_name
from torch_core.state.call import StateCall

#: The activations of the convolution, with the names of Hugging Face's `hidden_act`; None is the identity.
ACTIVATIONS = (None, "silu")
_WIDTHS = (2, 8)
#: The arrays of the results, by their names in the call's outputs.
OUTS = ("out", "out_1", "out_2")


@dataclass(frozen=True, kw_only=True)
class CausalConvCall(StateCall[A]):
    """A causal depthwise convolution (Mamba, Gu and Dao 2023, arXiv:2312.00752) with its state.

    `out[t] = activation(bias + sum over k of weight[:, k] * x[t - (width - 1) + k])` for each channel, in float32.
    Tokens before a sequence's first row are its state: the last `width - 1` inputs of the sequence, the oldest first,
    or zeros. One call takes prompts, chunks of prompts and decoded tokens together. The states are those of vLLM's
    `causal_conv1d_fn` and `causal_conv1d_update`, with the channels last.

    Attributes:
        x: new tokens of all sequences, one sequence after the other; rows after the last sequence are padding.
        first_column: the column of x that is the first channel; other columns are not read, and need no copy. None if
            x has the channels alone.
        weight: the weights of each channel, the last one for the token itself; the width is from 2 to 8.
        bias: bias of each channel; None for none.
        conv_states: a state in each slot; those of sequences with tokens are replaced, in place. None if every
            sequence starts from zeros and no state is kept.
        activation: None or "silu".
        out_sizes: channels of each of two or three arrays, `out`, `out_1` and `out_2`, which have the results in the
            order of the channels; None for one array.
        out: array of the results, not `x`; None allocates a new one. Rows of padding are 0.
    """

    name: ClassVar[str] = "causal_conv1d"
    tokens_in: ClassVar[str] = "x"
    states_in: ClassVar[str] = "conv_states"

    x: Float[A, "num_tokens num_columns"]
    weight: Float[A, "num_channels width"]
    bias: Float[A, "num_channels"] | None = None
    conv_states: Float[A, "num_states state_len num_channels"] | None = None
    activation: str | None = None
    first_column: int | None = None
    out_sizes: tuple[int, ...] | None = None
    out: Float[A, "num_tokens num_channels"] | None = None

    @property
    def width(self) -> int:
        """Tokens that an output sees."""
        return self.weight.shape[1]

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return self.weight.shape[0]

    def outputs(self) -> dict[str, ArraySpec]:
        """Returns `out`, unless it is given, or the arrays of `out_sizes`."""
        if self.out is not None:
            return {}
        sizes = self.out_sizes or (self.num_channels,)
        named = zip(OUTS, sizes, strict=False)
        return {name: ArraySpec((self.num_tokens, size), dtype_name(self.x)) for name, size in named}

    def equal_axes(self) -> dict[str, str]:
        """The columns of x are the channels, where devices split them."""
        return {"num_columns": "num_channels"}

    def of_channels(self) -> Any:
        """Returns the call with the channels of x alone."""
        if self.first_column is None:
            return self
        columns: Any = self.x[:, self.first_column : self.first_column + self.num_channels]
        return self.of({**self.__dict__, "x": columns, "first_column": None})

    @property
    def work(self) -> int:
        """The products."""
        return self.num_tokens * self.num_channels * self.width

    def check_statics(self) -> None:
        """Checks the column, and the sizes of the results."""
        if self.first_column is not None:
            check_int("first_column", self.first_column, 0)
        if self.out_sizes is not None:
            sizes, count = self.out_sizes, f"it must be a tuple of two to {len(OUTS)} sizes"
            if not isinstance(sizes, tuple) or not 2 <= len(sizes) <= len(OUTS):
                raise InvalidInput("out_sizes", value=sizes, wanted=count)
            for index, size in enumerate(sizes):
                check_int(f"out_sizes[{index}]", size, 1)

    def check_options(self) -> None:
        """Checks the width, the states' form, and the dtypes that go together."""
        least, most = _WIDTHS
        if not least <= self.width <= most:
            raise InvalidInput("weight", f"has width {self.width}", f"it must be from {least} to {most}")
        if self.num_channels == 0:
            raise InvalidInput("x", "has no channel", "there must be at least one")
        columns, first = self.x.shape[1], self.first_column
        if columns < self.num_channels or (first is None and columns != self.num_channels):
            wanted = f"num_channels must be {columns}, as in x, or fewer with first_column"
            raise InvalidInput("weight", f"has shape {tuple(self.weight.shape)}", wanted)
        check_int("first_column", first or 0, 0, columns - self.num_channels)
        if self.activation not in ACTIVATIONS:
            raise InvalidInput("activation", value=self.activation, wanted="it must be None or 'silu'")
        if self.out_sizes is not None and (self.out is not None or sum(self.out_sizes) != self.num_channels):
            wanted = f"they must be the {self.num_channels} channels together, without out"
            raise InvalidInput("out_sizes", value=self.out_sizes, wanted=wanted)
        self.check_states()
        if self.conv_states is not None and self.conv_states.shape[1] != self.width - 1:
            found, wanted = self.conv_states.shape[1], f"a width of {self.width} needs {self.width - 1}"
            raise InvalidInput("conv_states", f"holds {found} tokens in a slot", wanted)
        self.check_dtypes("x", "weight", "bias", "conv_states")
        if self.out is not None and dtype_name(self.out) != dtype_name(self.x):
            raise InvalidInput("out", f"is {dtype_name(self.out)}", f"it must be {dtype_name(self.x)}, as x is")
