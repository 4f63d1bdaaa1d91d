"""Layers with a state between tokens, with a model's options and called as `Attention` is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.llm.models.attention import Angles, KeysValues
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.joined import shared_sizes
from jattn.llm.models.layers import INITIALIZER, RMSNorm, dot_general
from jattn.llm.models.mixers import STATE_CONFIGS
from jattn.llm.models.tensor_parallel import TensorParallel
from jattn.metadata import AttentionMetadata
from jattn.nn import GatedDeltaNet, KimiDeltaAttention, LightningAttention, Mamba2, ShortConv
from jattn.nn.states import packed_sequences
from torch_core.base.errors import InvalidInput


class _Layer:
    """How a decoder calls its layers; over the layers of `jattn.nn`."""

    def forward_paged(
        self, x: jax.Array, angles: Angles | None, states: Any, metadata: AttentionMetadata
    ) -> tuple[jax.Array, Any]:
        """Maps packed tokens `[tokens, hidden]` from and to the sequences' states; returns output and states."""
        return self(x, states=states, metadata=metadata)  # type: ignore[operator]

    def forward_dense(
        self, x: jax.Array, angles: Angles | None, lengths: jax.Array | None = None, shared: KeysValues | None = None
    ) -> jax.Array:
        """Maps each row of `[batch, tokens, hidden]`; padding comes after a row's tokens."""
        return self(x)  # type: ignore[operator]


class ShortConvolution(_Layer, ShortConv):
    """The short convolution of one layer."""

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        sizes = _sizes(config, "conv")
        options |= {name: getattr(sizes, name) for name in ("conv_size", "use_bias", "num_channels")}
        super().__init__(config.hidden_size, **options)


class DeltaNet(_Layer, GatedDeltaNet):
    """The gated delta rule of one layer."""

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        sizes = _sizes(config, "linear_attn")
        names = ("num_kv_heads", "key_dim", "value_dim", "conv_size", "allow_neg_eigval")
        options |= {name: getattr(sizes, name) for name in names}
        epsilon = config.rms_norm_eps if sizes.norm_eps is None else sizes.norm_eps
        super().__init__(sizes.num_heads, config.hidden_size, epsilon=epsilon, **options)


class KimiDelta(_Layer, KimiDeltaAttention):
    """Kimi Delta Attention of one layer."""

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        sizes = _sizes(config, "kda")
        options |= {name: getattr(sizes, name) for name in ("head_dim", "conv_size", "full_rank_gates", "lower_bound")}
        options["epsilon"] = config.rms_norm_eps
        super().__init__(sizes.num_heads, config.hidden_size, **options)


class Lightning(_Layer, LightningAttention):
    """Lightning attention of one layer. The mean of its norm is over the heads of all devices."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel | None, **options: Any) -> None:
        sizes = _sizes(config, "lightning")
        super().__init__(sizes.num_heads, config.hidden_size, head_dim=sizes.head_dim, **options)
        inner = sizes.num_heads * sizes.head_dim
        self.norm = RMSNorm(inner, epsilon=1e-6, dtype=config.dtype, parallel=parallel)


class Mamba(_Layer, Mamba2):
    """Mamba-2 of one layer. If there are more devices than groups, each group has a copy on several devices.

    Where its first projection computes queries, keys and values too, it is called with the results; see `shared_sizes`.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel | None, **options: Any) -> None:
        sizes = _sizes(config, "mamba")
        self.parallel, self.group_parts = parallel, sizes.group_parts
        names = ("head_dim", "state_size", "num_groups", "conv_size", "use_bias", "conv_bias", "out_bias", "norm")
        options |= {name: getattr(sizes, name) for name in (*names, "dt_limit", "multipliers")}
        self.shared_sizes = shared_sizes(config)
        if self.shared_sizes is not None and sizes.in_multiplier != 1:
            options["multipliers"] = tuple(sizes.in_multiplier * each for each in sizes.multipliers or (1.0,) * 5)
        super().__init__(sizes.num_heads, config.hidden_size, epsilon=config.rms_norm_eps, **options)
        if self.shared_sizes is not None:
            used = sum(self.shared_sizes[:-1])
            self.in_proj.kernel[...] = self.in_proj.kernel[...].at[:, used:].set(0)

    @property
    def _num_columns(self) -> int:
        return super()._num_columns if self.shared_sizes is None else sum(self.shared_sizes)

    @property
    def _first_column(self) -> int:
        return 0 if self.shared_sizes is None else sum(self.shared_sizes[:3])

    def __call__(self, inputs: jax.Array, *, states: Any = None, metadata: AttentionMetadata | None = None) -> Any:
        """Computes the layer, of the results of a shared projection where it has one; see `Mamba2`."""
        if self.shared_sizes is None:
            return super().__call__(inputs, states=states, metadata=metadata)
        return self._mixed(inputs, states, *packed_sequences(inputs, inputs.shape[-1], states, metadata, num_states=2))

    def _mean_squares(self, groups: jax.Array) -> jax.Array:
        found, parallel, count = super()._mean_squares(groups), self.parallel, self.group_parts
        if parallel is None or count == 1:
            return found
        # Each device adds its part at the group's place.
        own = jnp.arange(parallel.parts("heads") // count) == parallel.first("heads", 1) // count
        return (parallel.summed(found * own[None, :, None], "heads") * own[None, :, None]).sum(1, keepdims=True) / count


_MODULES: Mapping[str, Callable[..., nnx.Module]] = MappingProxyType(
    {"conv": ShortConvolution, "linear_attn": DeltaNet, "kda": KimiDelta, "lightning": Lightning, "mamba": Mamba}
)


# Products of one row up to so many elements are sums of four in Mamba-2. A layer of Falcon-H1 7B, whose first one has
# 27 million weights, takes 0.7 us less in a decode step on an H100 (of 128) and an H200 (of 97); with a product of 38
# million in parts it takes 5 us more. For layers of attention that was not measured.
_FEW_ELEMENTS = 30_000_000


def mamba_dot_general(x: jax.Array, kernel: jax.Array, dimension_numbers: Any, **options: Any) -> jax.Array:
    """See `jattn.llm.models.layers.dot_general`."""
    return dot_general(x, kernel, dimension_numbers, few_elements=_FEW_ELEMENTS, **options)


def recurrent_mixer(
    name: str,
    config: ModelConfig,
    *,
    rngs: nnx.Rngs,
    implementation: str | None = None,
    parallel: TensorParallel | None = None,
) -> nnx.Module:
    """Returns the module of a mixer with a state, or of a device's part of one, by its name in a layer."""
    options = {"param_dtype": jnp.dtype(config.dtype), "kernel_init": INITIALIZER, "dot_general": dot_general}
    if name in ("lightning", "mamba"):
        options["parallel"] = parallel
    if name == "mamba":
        options["dot_general"] = mamba_dot_general
    return _MODULES[name](config, rngs=rngs, implementation=implementation, **options)


def _sizes(config: ModelConfig, mixer: str) -> Any:
    """Returns the part of a config with the sizes of a mixer."""
    part = STATE_CONFIGS[mixer]
    if getattr(config, part) is None:
        raise InvalidInput(f"config.{part}", value=None, wanted=f"a layer with {mixer} needs it")
    return getattr(config, part)
