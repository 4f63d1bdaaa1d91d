"""The mixers of a decoder's layers, by the layer's type, and the configs of those that keep a state between tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, TypeAlias

from jattn.llm.models.parts import MAX_HEAD_DIM, Factor, Flag
from torch_core.base.checks import check_bounds
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.limits import Choices, Limits, check_fields

#: The modules of a layer that mix tokens, by the layer's type; several run side by side, and their outputs are added. A
#: layer of feed-forward alone has none.
MIXERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention": ("self_attn",),
        "conv": ("conv",),
        "linear_attention": ("linear_attn",),
        "kimi_delta_attention": ("kda",),
        "lightning_attention": ("lightning",),
        "mamba": ("mamba",),
        "attention_mamba": ("self_attn", "mamba"),
        "feed_forward": (),
    }
)
#: The field of `ModelConfig` with the sizes of a mixer that keeps a state.
STATE_CONFIGS: Mapping[str, str] = MappingProxyType(
    {"conv": "short_conv", "linear_attn": "delta_net", "kda": "kimi_delta", "lightning": "lightning", "mamba": "mamba"}
)
LayerType: TypeAlias = Annotated[str, Choices(*MIXERS, error=Unsupported)]
_Width: TypeAlias = Annotated[int, Limits(2, 8)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """The gated short convolution of LFM2 (arXiv:2511.23404).

    Attributes:
        conv_size: number of tokens that the convolution sees.
        use_bias: projections and convolution have biases.
        num_channels: channels of the convolution; None for the hidden size.

    Raises:
        InvalidInput: a value of the wrong type or outside its limits.
    """

    conv_size: _Width = 3
    use_bias: Flag = False
    num_channels: Annotated[int | None, Limits(1, 1 << 20)] = None

    def __post_init__(self) -> None:
        check_fields(self, prefix="short_conv.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """Linear attention by the gated delta rule (Gated DeltaNet, arXiv:2412.06464).

    Attributes:
        num_heads: number of value heads.
        num_kv_heads: number of query and key heads; it divides num_heads.
        key_dim: number of elements of a query or key head.
        value_dim: number of elements of a value head.
        conv_size: number of tokens that the convolution before the rule sees.
        allow_neg_eigval: step sizes are from 0 to 2 instead of 0 to 1 (Grazzi et al. 2024, arXiv:2411.12537).
        norm_eps: term of the norm of the results; None for the model's rms_norm_eps.

    Raises:
        InvalidInput: a value of the wrong type or outside its limits.
    """

    num_heads: Annotated[int, Limits(1, 1024)]
    num_kv_heads: Annotated[int, Limits(1, 1024)]
    key_dim: Annotated[int, Limits(1, MAX_HEAD_DIM)]
    value_dim: Annotated[int, Limits(1, MAX_HEAD_DIM)]
    conv_size: _Width = 4
    allow_neg_eigval: Flag = False
    norm_eps: Annotated[float | None, Limits(1e-12, 1.0)] = None

    def __post_init__(self) -> None:
        check_fields(self, prefix="delta_net.")
        if self.num_heads % self.num_kv_heads:
            wanted = f"it must be a multiple of num_kv_heads ({self.num_kv_heads})"
            raise InvalidInput("delta_net.num_heads", value=self.num_heads, wanted=wanted)

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """Outputs of the products with the input: queries, keys, values, their gates, step sizes and decays."""
        keys, values = self.num_kv_heads * self.key_dim, self.num_heads * self.value_dim
        return keys, keys, values, values, self.num_heads, self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """The state space model of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) with its convolution and norm.

    Attributes:
        num_heads: number of heads.
        head_dim: number of elements of a head: rows of its state.
        state_size: columns of a head's state.
        num_groups: groups of heads that share B and C, and whose results have a norm of their own; it divides
            num_heads.
        group_parts: devices over which the heads of a group are spread, in the config of a device's part of a model.
        conv_size: number of tokens that the convolution sees.
        use_bias, conv_bias, out_bias: the first projection, the convolution and the last projection have a bias.
        norm: "gated" is over the results times the gate, "before_gate" over the results; None for no norm.
        dt_limit: the least and the largest step size.
        multipliers: factors of the gate, x, B, C and the step sizes after the first projection; None for none.
        in_multiplier, out_multiplier: factors of the layer's input and output.

    Raises:
        InvalidInput: a value of the wrong type or outside its limits.
        Unsupported: another norm.
    """

    num_heads: Annotated[int, Limits(1, 1024)]
    head_dim: Annotated[int, Limits(1, 1 << 12)]
    state_size: Annotated[int, Limits(1, 1 << 12)]
    num_groups: Annotated[int, Limits(1, 1024)] = 1
    group_parts: Annotated[int, Limits(1, 1024)] = 1
    conv_size: _Width = 4
    use_bias: Flag = False
    conv_bias: Flag = True
    out_bias: Flag = False
    norm: Annotated[str | None, Choices(None, "gated", "before_gate", error=Unsupported)] = "gated"
    dt_limit: Annotated[tuple[float, float], check_bounds] = (0.0, float("inf"))
    multipliers: tuple[Factor, Factor, Factor, Factor, Factor] | None = None
    in_multiplier: Factor = 1.0
    out_multiplier: Factor = 1.0

    def __post_init__(self) -> None:
        check_fields(self, prefix="mamba.")
        if self.num_heads % self.num_groups:
            wanted = f"it must be a multiple of num_groups ({self.num_groups})"
            raise InvalidInput("mamba.num_heads", value=self.num_heads, wanted=wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningConfig:
    """Lightning attention (arXiv:2401.04658): linear attention whose state decays at a rate of each head.

    Attributes:
        num_heads: number of heads.
        head_dim: number of elements of a head of queries, keys and values.

    Raises:
        InvalidInput: a value of the wrong type or outside its limits.
    """

    num_heads: Annotated[int, Limits(1, 1024)]
    head_dim: Annotated[int, Limits(1, MAX_HEAD_DIM)]

    def __post_init__(self) -> None:
        check_fields(self, prefix="lightning.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaConfig:
    """Kimi Delta Attention (arXiv:2510.26692): the gated delta rule with a gate for each channel of a key.

    Attributes:
        num_heads: number of heads.
        head_dim: number of elements of a head of queries, keys and values, and width of the compressed gates.
        conv_size: number of tokens that the convolution before the rule sees.
        full_rank_gates, lower_bound: as in `jattn.nn.KimiDeltaAttention`.

    Raises:
        InvalidInput: a value of the wrong type or outside its limits.
    """

    num_heads: Annotated[int, Limits(1, 1024)]
    head_dim: Annotated[int, Limits(1, MAX_HEAD_DIM)]
    conv_size: _Width = 4
    full_rank_gates: Flag = False
    lower_bound: Annotated[float | None, Limits(-1e3, -1e-3, also=", or None")] = None

    def __post_init__(self) -> None:
        check_fields(self, prefix="kimi_delta.")
