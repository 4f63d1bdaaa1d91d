"""The logical axes of parameters, and the split of a decoder by them over a mesh axis.

This is flax's way (`flax.linen.logical_axis_rules`): a model names an axis, a table maps the name to a mesh axis. Here
the name follows from a parameter's path, so parameters that are loaded, initialised or received from a trainer need no
metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.parts import FullAttentionConfig
from jattn.parallel import all_reduce, sum_in_order
from torch_core.base.checks import check_int, shown
from torch_core.base.errors import InvalidInput, Unsupported

#: Megatron's rules (Shoeybi et al. 2019, arXiv:1909.08053): the first product is split by columns, the second by rows,
#: so that one sum over devices ends each branch; the vocabulary and the experts are distributed.
DEFAULT_RULES: Mapping[str, str | None] = MappingProxyType(
    {"vocab": "tp", "heads": "tp", "kv_heads": "tp", "mlp": "tp", "experts": "tp", "embed": None, "expert_mlp": None}
)

# Input and output axis of each linear module, by its name; a bias has the output's.
_LINEAR: dict[str, tuple[str | None, str | None]] = {
    "qkv_proj": ("embed", "heads"),
    "q_proj": ("embed", "heads"),
    "gate_proj": ("embed", "heads"),
    "v_proj": ("embed", "heads"),
    "q_b_proj": (None, "heads"),
    "kv_b_proj": (None, "heads"),
    "o_proj": ("heads", "embed"),
    "gate_up_proj": ("embed", "mlp"),
    "up_proj": ("embed", "mlp"),
    "down_proj": ("mlp", "embed"),
    "lm_head": ("embed", "vocab"),
    "in_proj": ("embed", "heads"),
    "out_proj": ("heads", "embed"),
}
_EXPERTS = {
    "gate_up_proj": ("embed", "expert_mlp"),
    "up_proj": ("embed", "expert_mlp"),
    "down_proj": ("expert_mlp", "embed"),
}
# Modules of flax's MultiHeadAttention, whose heads have an axis of their own.
_HEADS = {"query": "heads", "key": "kv_heads", "value": "kv_heads"}

_SPLIT = ("vocab", "heads", "mlp", "experts")
# As engines and commands have it, and as the class below.
_CONTEXT = "decode_context_parallel_size (context_size)"


def logical_axes(path: Sequence[str | int], ndim: int) -> tuple[str | None, ...]:
    """Returns the logical name of each axis of a parameter; None for an axis that is never split.

    Args:
        path: path of the parameter in the nnx state of a module of `jattn.nn` or `jattn.llm.models`.
        ndim: number of axes of the parameter.

    Example:
        >>> logical_axes(("layers", 0, "mlp", "down_proj", "kernel"), 2)
        ('mlp', 'embed')
        >>> logical_axes(("attention", "query", "kernel"), 3)
        ('embed', 'heads', None)
    """
    leaf, module = path[-1], path[-2] if len(path) > 1 else ""
    axes: tuple[str | None, ...] = ()
    if leaf == "embedding":
        axes = ("vocab" if module == "embed_tokens" else None, "embed")
    elif leaf == "sinks":
        axes = ("heads",)
    elif module in ("q_norm", "k_norm") and ndim == 2:
        axes = ("heads" if module == "q_norm" else "kv_heads", None)
    elif "moe" in path and "shared_expert" not in path and module in _EXPERTS:
        inner, outer = _EXPERTS[str(module)]
        axes = ("experts", inner, outer) if leaf == "kernel" else ("experts", outer)
    elif module in _LINEAR:
        axes = _LINEAR[str(module)] if leaf == "kernel" else _LINEAR[str(module)][1:]
    elif module in _HEADS:
        axes = ("embed", _HEADS[str(module)], None) if leaf == "kernel" else (_HEADS[str(module)], None)
    elif module == "out":
        axes = ("heads", None, "embed") if leaf == "kernel" else ("embed",)
    return (*axes, *(None,) * (ndim - len(axes)))[:ndim]


def partition_specs(model: nnx.Module | nnx.State, rules: Mapping[str, str | None] = DEFAULT_RULES) -> Any:
    """Returns a state of the same tree with a PartitionSpec for every parameter: for training along Auto axes.

    A parameter has the layout of one device, only split: XLA moves activations where the split does not fit their use
    (a product that computes queries, keys and values at once). For generation see `jattn.llm.models.shard_model`.

    Args:
        model: a module of `jattn.nn` or `jattn.llm.models`, or its state.
        rules: the mesh axis of each logical one, None for whole.

    Raises:
        InvalidInput: the rules lack an axis.
    """
    flat = nnx.to_flat_state(nnx.state(model) if isinstance(model, nnx.Module) else model)
    specs: list[Any] = []
    pairs: Any = flat
    for path, leaf in pairs:
        axes = logical_axes(path, leaf.ndim)
        unknown = [axis for axis in axes if axis is not None and axis not in rules]
        if unknown:
            raise InvalidInput("rules", f"have no axis {shown(unknown[0])}", f"they have {', '.join(rules)}")
        specs.append((path, leaf.replace(PartitionSpec(*(axis and rules[axis] for axis in axes)))))
    return nnx.from_flat_state(specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """A cut of a decoder over the devices of a mesh axis, Megatron's by default (arXiv:1909.08053).

    Each device has some heads, some columns of the feed-forward layers (or some experts) and some rows of the
    vocabulary; the outputs of attention and feed-forward part are summed over the devices. If there are fewer key/value
    heads than devices, each head has a copy on several devices.

    Attributes:
        size: devices.
        axis: the mesh axis.
        context_size: number of neighbouring devices, among those with copies of the same key/value heads, that share
            one cache; each keeps its share of every sequence's tokens (decode context parallelism).
        rules: changes of `jattn.llm.models.DEFAULT_RULES`: None keeps "vocab", "mlp", "experts" or "heads" (with them
            "kv_heads") whole on every device.

    Raises:
        InvalidInput: rules for axes that do not exist, or that split others.
    """

    size: int
    axis: str = "tp"
    context_size: int = 1
    rules: Mapping[str, str | None] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_int("tensor_parallel.size", self.size, 1)
        check_int("tensor_parallel.context_size", self.context_size, 1)
        if not isinstance(self.axis, str) or not self.axis:
            raise InvalidInput("tensor_parallel.axis", value=self.axis, wanted="it must be the name of a mesh axis")
        for name, to in self.rules.items():
            if name not in _SPLIT or to not in (None, self.axis):
                raise InvalidInput(
                    f"rules[{shown(name)}] is {shown(to)}; a decoder is cut along {', '.join(_SPLIT)}, each by "
                    f"{self.axis!r} or None."
                )
        rules = {name: self.axis if to else None for name, to in DEFAULT_RULES.items()} | dict(self.rules)
        object.__setattr__(self, "rules", rules | {"kv_heads": rules["heads"]})

    def parts(self, name: str) -> int:
        """Returns over how many devices a logical axis is split."""
        return self.size if self.rules[name] is not None else 1

    def summed(self, x: jax.Array, name: str, peers: jax.Array | None = None, in_order: bool = False) -> jax.Array:
        """Returns the sum over the devices that split a logical axis.

        Args:
            x: this device's part.
            name: the logical axis.
            peers: as in `jattn.parallel.all_reduce`.
            in_order: a row's bits do not depend on the number of rows; see `jattn.parallel.sum_in_order`.
        """
        if self.parts(name) == 1:
            return x
        return sum_in_order(x, self.axis) if in_order else all_reduce(x, self.axis, peers)

    def summed_and_normed(
        self, x: jax.Array, residual: jax.Array, norm: Any, name: str, peers: jax.Array | None
    ) -> tuple[jax.Array, jax.Array] | None:
        """Returns residual + the sum that `summed` is, and its norm, in one launch; None if no kernel does that."""
        if peers is None or self.parts(name) == 1 or not hasattr(norm, "of_sum"):
            return None
        return norm.of_sum(x, residual, self.axis, peers)

    def looked_up(
        self, rows: Callable[[jax.Array], jax.Array], ids: jax.Array, count: int, peers: jax.Array | None = None
    ) -> jax.Array:
        """Returns the rows of a table that is split along "vocab".

        Args:
            rows: returns those of this device's part, of ids in it.
            ids: int32[...], in the whole table.
            count: rows of this device's part.
            peers: as in `summed`.
        """
        if self.parts("vocab") == 1:
            return rows(ids)
        local = ids - self.first("vocab", count)
        is_own = (local >= 0) & (local < count)
        # All but one of the sum's terms are 0, so that it rounds nothing.
        return self.summed(jnp.where(is_own[..., None], rows(jnp.where(is_own, local, 0)), 0), "vocab", peers)

    def first(self, name: str, count: int) -> jax.Array | int:
        """Returns the index of this device's first entry of an axis, of which each device has `count`."""
        return jax.lax.axis_index(self.axis) * count if self.parts(name) > 1 else 0

    def check(self, config: ModelConfig) -> None:
        """Raises InvalidInput or Unsupported for a decoder that cannot be cut so; the message has the size."""
        if config.encoder is not None or config.position_embedding == "relative" or config.logits_bias:
            raise Unsupported("an encoder-decoder is not cut over devices; give each copy a device of its own.")
        if self.context_size > 1 and (config.latent is not None or config.full_attention is not None):
            which = "attends to latents" if config.full_attention is None else "has layers with other heads"
            raise Unsupported(
                f"{_CONTEXT} is {self.context_size} and the model {which}, whose cache is not spread over devices; "
                "leave it at 1."
            )
        for own in dict.fromkeys(map(config.of_layer, range(config.num_hidden_layers))):
            self._check_layer(own)
        parts = self.parts("heads")
        for name, size in _state_heads(config).items():
            self._check_divides(name, size, "heads")
        if config.mamba is not None and (groups := config.mamba.num_groups) % parts and parts % groups:
            problem = f"is {groups} and tensor_parallel.size {parts}"
            raise InvalidInput("mamba.num_groups", problem, "one must be a multiple of the other")
        moe = config.moe
        if moe is None or moe.dense_layers or moe.with_mlp:
            self._check_divides("intermediate_size", config.intermediate_size, "mlp")
        if moe is None:
            return
        self._check_divides("moe.num_experts", moe.num_experts, "experts")
        if moe.shared_width:
            self._check_divides("the shared expert's width", moe.shared_width, "mlp")
        if (moe.shared_width or moe.with_mlp) and self.parts("mlp") != self.parts("experts"):
            raise InvalidInput("rules", "split one of 'mlp' and 'experts'", "with shared experts they go together")

    def _check_layer(self, config: ModelConfig) -> None:
        """Checks the heads of a layer with these sizes."""
        self._check_divides("num_attention_heads", config.num_attention_heads, "heads")
        heads, parts = config.num_key_value_heads, self.parts("heads")
        if heads % parts and parts % heads:
            raise InvalidInput(
                f"num_key_value_heads is {heads} and tensor_parallel.size {parts}; one must be a multiple of the other."
            )
        copies = max(parts // heads, 1)
        if copies % self.context_size:
            raise InvalidInput(
                f"{_CONTEXT} is {self.context_size}; {heads} key/value heads on {parts} devices have {copies} copies "
                "each, and it must divide them. Heads that are dealt out already take no more memory on more devices."
            )

    def local(self, config: ModelConfig) -> ModelConfig:
        """Returns the config of one device's part of each layer."""
        full = config.full_attention
        return replace(
            config,
            **self._local_heads(config),
            full_attention=None if full is None else replace(full, **self._local_heads(full)),
            intermediate_size=max(config.intermediate_size // self.parts("mlp"), 1),
            **self._local_states(config),
        )

    def _local_heads(self, sizes: ModelConfig | FullAttentionConfig) -> dict[str, Any]:
        heads = sizes.num_attention_heads
        own = None if heads is None else heads // self.parts("heads")
        return {"num_attention_heads": own, "num_key_value_heads": self.kv_heads(sizes)}

    def _local_states(self, config: ModelConfig) -> dict[str, Any]:
        """Returns the configs of one device's part of the mixers that keep a state."""
        parts, local = self.parts("heads"), {}
        if (conv := config.short_conv) is not None:
            local["short_conv"] = replace(conv, num_channels=config.hidden_size // parts)
        if (delta := config.delta_net) is not None:
            sizes = {"num_heads": delta.num_heads // parts, "num_kv_heads": delta.num_kv_heads // parts}
            local["delta_net"] = replace(delta, **sizes)
        if (kimi := config.kimi_delta) is not None:
            local["kimi_delta"] = replace(kimi, num_heads=kimi.num_heads // parts)
        if (lightning := config.lightning) is not None:
            local["lightning"] = replace(lightning, num_heads=lightning.num_heads // parts)
        if (mamba := config.mamba) is not None:
            groups, each = max(mamba.num_groups // parts, 1), max(parts // mamba.num_groups, 1)
            local["mamba"] = replace(mamba, num_heads=mamba.num_heads // parts, num_groups=groups, group_parts=each)
        return local

    def kv_heads(self, config: ModelConfig | FullAttentionConfig) -> int:
        """Returns the key/value heads that one device has."""
        return max(config.num_key_value_heads // self.parts("heads"), 1)

    def vocab(self, vocab_size: int) -> int:
        """Returns the rows of the vocabulary that one device has, the last of which may be padding."""
        return -(-vocab_size // self.parts("vocab"))

    def _check_divides(self, name: str, size: int, axis: str) -> None:
        if size % self.parts(axis):
            raise InvalidInput(
                f"{name} is {size}; it must be a multiple of tensor_parallel.size ({self.parts(axis)}). Keep it whole "
                f"by jattn.llm.models.shard_model(model, mesh, TensorParallel(size={self.size}, "
                f"rules={{{axis!r}: None}}))."
            )


def _state_heads(config: ModelConfig) -> dict[str, int]:
    """Returns the numbers of heads, or channels, of the mixers that keep a state, by the names of the config."""
    found = {} if config.short_conv is None else {"hidden_size": config.hidden_size}
    if config.delta_net is not None:
        found["delta_net.num_kv_heads"] = config.delta_net.num_kv_heads
    for name in ("kimi_delta", "lightning", "mamba"):
        if (sizes := getattr(config, name)) is not None:
            found[f"{name}.num_heads"] = sizes.num_heads
    return found
