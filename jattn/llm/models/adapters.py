"""The linear layers of a decoder that low-rank adapters (LoRA, arXiv:2106.09685) may change, and trainable adapters."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.llm.models.batch_adapters import BatchAdapters, LoraWeights
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.shapes import parameter_shapes
from jattn.ops import AdapterRows
from torch_core.adapters.call import MAX_RANK
from torch_core.base.checks import check_int, shown
from torch_core.base.errors import InvalidInput, Unsupported

# Modules of a layer that may have an adapter: linear layers that are called, and whose kernels nothing else reads.
_ATTENTION = ("qkv_proj", "q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
_MODULES = {
    "self_attn": _ATTENTION,
    "mlp": ("gate_up_proj", "up_proj", "down_proj"),
    "moe.shared_expert": ("gate_up_proj", "up_proj", "down_proj"),
}


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A linear layer that adapters may change.

    Attributes:
        layer: index of the decoder's layer.
        module: path of the module in the layer, such as "self_attn.qkv_proj".
        in_size, out_size: sizes of its kernel.
        num_slices: layers that it joins: queries, keys and values, or gate and up.
    """

    layer: int
    module: str
    in_size: int
    out_size: int
    num_slices: int

    @property
    def kernel(self) -> tuple[str | int, ...]:
        """Path of its kernel in the model."""
        return ("layers", self.layer, *self.module.split("."), "kernel")

    def shapes(self, num_slots: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of `LoraWeights`."""
        return (num_slots, self.num_slices * rank, self.in_size), (num_slots, self.out_size, rank)


@functools.lru_cache(maxsize=16)
def adapter_targets(config: ModelConfig) -> tuple[AdapterTarget, ...]:
    """Returns the linear layers of a decoder that adapters may change, layer by layer.

    Those of attention and of the feed-forward part. Experts, routers, layers with a state, embeddings and heads have
    none, nor have queries, keys and values that are joined with a gate.

    Example:
        >>> config = ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        ...                      num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        >>> [(target.module, target.num_slices) for target in adapter_targets(config)]
        [('mlp.down_proj', 1), ('mlp.gate_up_proj', 2), ('self_attn.o_proj', 1), ('self_attn.qkv_proj', 3)]
    """
    if config.encoder is not None or config.is_encoder:
        raise Unsupported("config", "has an encoder", "adapters are for decoders")
    found = []
    for path, shape in parameter_shapes(config).items():
        if path[0] != "layers" or path[-1] != "kernel" or len(shape) != 2:
            continue
        if path[-2] not in _MODULES.get(".".join(map(str, path[2:-2])), ()):
            continue
        if path[-2] == "qkv_proj" and config.attn_output_gate:
            continue
        num_slices = {"gate_up_proj": 2, "qkv_proj": 3}.get(str(path[-2]), 1)
        # Keys and values that are another layer's.
        num_slices = 1 if path[-2] == "qkv_proj" and shape[1] == config.query_size else num_slices
        found.append(AdapterTarget(int(path[1]), ".".join(map(str, path[2:-1])), *shape, num_slices))
    return tuple(found)


class Adapters(nnx.Module):
    """Trainable adapters of one decoder, whose weights stay as they are: gradients are taken of this module alone.

    One batch may have rows of all of them, and each gets the gradient of its own rows. The parameters are
    `nnx.LoRAParam`. At first an adapter changes nothing, as in PEFT: its second matrices are 0.

    Args:
        config: config of the decoder.
        rank: rank of each adapter.
        num_adapters: number of adapters.
        alpha: the products are scaled by alpha / rank; None for the rank.
        use_rslora: scale by alpha / sqrt(rank) instead (Kalajdzievski 2023, arXiv:2312.03732).
        target_modules: names of modules, such as "qkv_proj" or "self_attn.qkv_proj"; None for all of `adapter_targets`.
        dtype: dtype of the parameters; None for the decoder's. The products are computed in the decoder's.
        rngs: source of the initial values.

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
        targets = chosen_targets(config, target_modules)
        # The bound of torch's linear layers, as in PEFT.
        uniform = jax.nn.initializers.variance_scaling(
            1 / 3, "fan_in", "uniform", in_axis=-1, out_axis=-2, batch_axis=0
        )
        self.layers = nnx.List([nnx.Dict() for _ in range(config.num_hidden_layers)])
        for target in targets:
            first, second = target.shapes(num_adapters, rank)
            self.layers[target.layer][target.module] = nnx.Dict(
                lora_a=nnx.LoRAParam(uniform(rngs.params(), first, param_dtype)),
                lora_b=nnx.LoRAParam(jnp.zeros(second, param_dtype)),
            )

    def batch(self, adapters: jax.Array, num_tokens: int = 1) -> BatchAdapters:
        """Returns the adapters of a batch, for `Decoder.forward_dense(adapters=...)`.

        Args:
            adapters: int32[batch], the adapter of each sequence; -1 for none.
            num_tokens: number of tokens of a sequence.
        """
        dtype = jnp.dtype(self.config.dtype)

        def weights(module: Any) -> LoraWeights:
            scaled = module["lora_b"][...] * self.scaling
            return LoraWeights(module["lora_a"][...].astype(dtype), scaled.astype(dtype))

        layers = tuple({name: weights(module) for name, module in layer.items()} for layer in self.layers)
        return BatchAdapters(layers, AdapterRows.of(jnp.repeat(adapters, num_tokens), self.num_adapters))


def lora_scaling(rank: int, alpha: float, *, use_rslora: bool) -> float:
    """Returns the factor of an adapter's products."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def chosen_targets(config: ModelConfig, names: Sequence[str] | None) -> tuple[AdapterTarget, ...]:
    """Returns the targets with one of the names: a module's last one or more.

    Raises:
        InvalidInput: a name that no module has.
    """
    targets = adapter_targets(config)
    if names is None:
        return targets
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InvalidInput("target_modules", value=names, wanted="it must be a list of names")
    for name in names:
        if not any(_has_name(target, name) for target in targets):
            known = sorted({target.module for target in targets})
            raise InvalidInput("target_modules", f"has {shown(name)}", f"this model has {', '.join(known)}")
    return tuple(target for target in targets if any(_has_name(target, name) for name in names))


def _has_name(target: AdapterTarget, name: str) -> bool:
    return f".{target.module}".endswith(f".{name}")
