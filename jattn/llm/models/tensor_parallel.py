"""TensorParallel: the split of a decoder over a mesh axis, and the computation of one device's part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.logical_axes import DEFAULT_RULES
from jattn.parallel import all_reduce
from torch_core.base.checks import check_int, shown
from torch_core.base.errors import InvalidInput, Unsupported

_SPLIT = ("vocab", "heads", "mlp", "experts")
# As engines and commands have it, and as the class below.
_CONTEXT = "decode_context_parallel_size (context_size)"


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

    def summed(self, x: jax.Array, name: str, peers: jax.Array | None = None) -> jax.Array:
        """Returns the sum over the devices that split a logical axis; `peers` as in `jattn.parallel.all_reduce`."""
        return all_reduce(x, self.axis, peers) if self.parts(name) > 1 else x

    def summed_and_normed(
        self, x: jax.Array, residual: jax.Array, norm: Any, name: str, peers: jax.Array | None
    ) -> tuple[jax.Array, jax.Array] | None:
        """Returns residual + the sum that `summed` is, and its norm, in one launch; None if no kernel does that."""
        if peers is None or self.parts(name) == 1 or not hasattr(norm, "of_sum"):
            return None
        return norm.of_sum(x, residual, self.axis, peers)

    def first(self, name: str, count: int) -> jax.Array | int:
        """Returns the index of this device's first entry of an axis, of which each device has `count`."""
        return jax.lax.axis_index(self.axis) * count if self.parts(name) > 1 else 0

    def check(self, config: ModelConfig) -> None:
        """Refuses a decoder that cannot be cut so.

        Raises:
            InvalidInput: a size does not divide; the message has it.
            Unsupported: an encoder-decoder, or T5's positions.
        """
        if config.encoder is not None or config.position_embedding == "relative" or config.logits_bias:
            raise Unsupported("an encoder-decoder is not cut over devices; give each copy a device of its own.")
        self._check_divides(config, "num_attention_heads", config.num_attention_heads, "heads")
        heads, parts = config.num_key_value_heads, self.parts("heads")
        if heads % parts and parts % heads:
            raise InvalidInput(
                f"num_key_value_heads is {heads} and tensor_parallel.size {parts}; one must be a multiple of the other."
            )
        self._check_context(config)
        if config.moe is None or len(config.moe.dense_layers):
            self._check_divides(config, "intermediate_size", config.intermediate_size, "mlp")
        if config.moe is None:
            return
        self._check_divides(config, "moe.num_experts", config.moe.num_experts, "experts")
        if config.moe.shared_width:
            self._check_divides(config, "the shared expert's width", config.moe.shared_width, "mlp")
            if self.parts("mlp") != self.parts("experts"):
                raise InvalidInput("rules", "split one of 'mlp' and 'experts'", "with shared experts they go together")

    def local(self, config: ModelConfig) -> ModelConfig:
        """Returns the config of one device's part of each layer."""
        heads, kv_heads = config.num_attention_heads // self.parts("heads"), self.kv_heads(config)
        return replace(
            config,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=max(config.intermediate_size // self.parts("mlp"), 1),
        )

    def kv_heads(self, config: ModelConfig) -> int:
        """Returns the key/value heads that one device has."""
        return max(config.num_key_value_heads // self.parts("heads"), 1)

    def vocab(self, vocab_size: int) -> int:
        """Returns the rows of the vocabulary that one device has, the last of which may be padding."""
        return -(-vocab_size // self.parts("vocab"))

    def _check_context(self, config: ModelConfig) -> None:
        if self.context_size == 1:
            return
        if config.latent is not None:
            raise Unsupported(
                f"{_CONTEXT} is {self.context_size} and the model attends to latents, which are not spread over "
                "devices; leave it at 1."
            )
        heads, parts = config.num_key_value_heads, self.parts("heads")
        copies = max(parts // heads, 1)
        if copies % self.context_size:
            raise InvalidInput(
                f"{_CONTEXT} is {self.context_size}; {heads} key/value heads on {parts} devices have {copies} copies "
                "each, and it must divide them. Heads that are dealt out already take no more memory on more devices."
            )

    def _check_divides(self, config: ModelConfig, name: str, size: int, axis: str) -> None:
        if size % self.parts(axis):
            raise InvalidInput(
                f"{name} is {size}; it must be a multiple of tensor_parallel.size ({self.parts(axis)}). Keep it whole "
                f"by jattn.llm.models.shard_model(model, mesh, TensorParallel(size={self.size}, "
                f"rules={{{axis!r}: None}}))."
            )
