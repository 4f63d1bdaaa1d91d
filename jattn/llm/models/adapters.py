"""Trainable low-rank adapters (LoRA, arXiv:2106.09685) of a decoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.llm.models.adapter_targets import AdapterTarget, chosen_targets
from jattn.llm.models.batch_adapters import BatchAdapters, LoraWeights
from jattn.llm.models.config import ModelConfig
from torch_core.adapters.call import MAX_RANK
from torch_core.base.checks import check_int


class Adapters(nnx.Module):
    """Trainable adapters of one decoder, whose weights stay as they are: gradients are taken of this module alone.

    One batch may have rows of all of them, and each gets the gradient of its own rows. The parameters are
    `nnx.LoRAParam`. At first an adapter changes nothing, as in PEFT: its second matrices are 0, or the embedding's
    first.

    Args:
        config: config of the decoder.
        rank: rank of each adapter.
        num_adapters: number of adapters.
        alpha: the products are scaled by alpha / rank; None for the rank.
        use_rslora: scale by alpha / sqrt(rank) instead (Kalajdzievski 2023, arXiv:2312.03732).
        target_modules: names of modules of `adapter_targets`, such as "qkv_proj", "moe.down_proj" or "lm_head"; None
            for all of the layers but routers, gates of shared experts and indexers.
        dtype: dtype of the parameters; None for the decoder's. The products are computed in the decoder's.
        rngs: source of the initial values.

    Attributes:
        layers: the modules of each layer by name, each with `lora_a` and `lora_b`.
        outside: those of the embedding and the head.

    Raises:
        InvalidInput: a size out of range, or a target that the decoder has not.

    Example:
        >>> config = ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        ...                      num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        >>> adapters = Adapters(config, rank=4, num_adapters=2, target_modules=["qkv_proj"], rngs=nnx.Rngs(0))
        >>> adapters.layers[0]["self_attn.qkv_proj"]["lora_a"].shape  # those of queries, keys and values
        (2, 12, 64)
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rank: int,
        num_adapters: int = 1,
        alpha: float | None = None,
        use_rslora: bool = False,
        target_modules: Sequence[str] | None = None,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_int("rank", rank, 1, MAX_RANK)
        check_int("num_adapters", num_adapters, 1, 1 << 16)
        self.config, self.rank, self.num_adapters = config, rank, num_adapters
        self.scaling = lora_scaling(rank, rank if alpha is None else alpha, use_rslora=use_rslora)
        param_dtype = jnp.dtype(config.dtype if dtype is None else dtype)
        self.layers = nnx.List([nnx.Dict() for _ in range(config.num_hidden_layers)])
        self.outside = nnx.Dict()
        for target in chosen_targets(config, target_modules):
            first, second = ((num_adapters, *shape) for shape in target.shapes(rank))
            if target.is_embedding:
                lora_a, lora_b = jnp.zeros(first, param_dtype), jax.random.normal(rngs.params(), second, param_dtype)
            else:
                lora_a, lora_b = _uniform(len(first))(rngs.params(), first, param_dtype), jnp.zeros(second, param_dtype)
            pair = nnx.Dict(lora_a=nnx.LoRAParam(lora_a), lora_b=nnx.LoRAParam(lora_b))
            (self.outside if target.layer is None else self.layers[target.layer])[target.module] = pair

    def of(self, target: AdapterTarget) -> Any:
        """Returns the matrices of a target, `lora_a` and `lora_b`; None if it has none here."""
        if target.layer is None:
            return self.outside.get(target.module)
        return self.layers[target.layer].get(target.module) if target.layer < len(self.layers) else None

    def batch(self, adapters: jax.Array, num_tokens: int = 1) -> BatchAdapters:
        """Returns the adapters of a batch, for `Decoder.forward_dense(adapters=...)`.

        Args:
            adapters: int32[batch], the adapter of each sequence; -1 for none.
            num_tokens: number of tokens of a sequence.
        """
        dtype = jnp.dtype(self.config.dtype)

        def weights(modules: Any) -> dict[str, LoraWeights]:
            return {
                name: LoraWeights(
                    module["lora_a"][...].astype(dtype), (module["lora_b"][...] * self.scaling).astype(dtype)
                )
                for name, module in modules.items()
            }

        layers = tuple(weights(layer) for layer in self.layers)
        return BatchAdapters.of(layers, weights(self.outside), jnp.repeat(adapters, num_tokens), self.num_adapters)


def lora_scaling(rank: int, alpha: float, *, use_rslora: bool) -> float:
    """Returns the factor of an adapter's products."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def _uniform(num_axes: int) -> Any:
    """Returns the initialiser of torch's linear layers, as in PEFT, of matrices [..., out, in]."""
    batch = tuple(range(num_axes - 2))
    return jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=-1, out_axis=-2, batch_axis=batch)
