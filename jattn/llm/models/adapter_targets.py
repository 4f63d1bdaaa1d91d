"""The parts of a decoder that low-rank adapters (LoRA, arXiv:2106.09685) may change, and their matrices' shapes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jattn.llm.models.batch_adapters import EMBEDDING, HEAD
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.joined import DELTA_IN, MAMBA_IN, QKV, joined_sizes
from jattn.llm.models.shapes import ParameterPath, parameter_shapes
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput, Unsupported

# Modules that choose experts or tokens. An adapter of one takes the choice's kernels from every step with adapters.
_CHOOSE = ("moe.router", "moe.shared_expert_gate", "self_attn.indexer.")
# Names of vLLM and of Qwen3-Next's files for parts of a module; a list of names means all of it.
_ALSO_NAMED = {DELTA_IN: tuple(f"linear_attn.in_proj_{part}" for part in ("qkvz", "ba"))}
_EMBEDDING_PATH: ParameterPath = (EMBEDDING, "embedding")


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A linear layer, one of all experts, the embedding or the head.

    Attributes:
        layer: index of the decoder's layer; None outside of the layers.
        module: path of the module in the layer, such as "self_attn.qkv_proj"; or "embed_tokens" or "lm_head".
        kernel: path of its kernel in the model; a tied head has the embedding's.
        in_size, out_size: sizes of its kernel, of one expert's. The inputs of the embedding are tokens.
        slices: outputs of each layer that it joins, such as queries, keys and values, or gate and up; of one expert.
        num_experts: experts that have a kernel each; 0 of a layer without.
    """

    layer: int | None
    module: str
    kernel: ParameterPath
    in_size: int
    out_size: int
    slices: tuple[int, ...]
    num_experts: int = 0

    @property
    def name(self) -> str:
        """Its path in the model."""
        return self.module if self.layer is None else f"layers.{self.layer}.{self.module}"

    @property
    def is_embedding(self) -> bool:
        """Rows of the first matrix are chosen by tokens."""
        return self.module == EMBEDDING

    @property
    def num_slices(self) -> int:
        """Layers that it joins."""
        return len(self.slices)

    @property
    def is_choice(self) -> bool:
        """It chooses experts or tokens, and has adapters only if they are named."""
        return self.module.startswith(_CHOOSE)

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of an adapter's matrices: those of `LoraWeights` without slots."""
        experts = (self.num_experts,) if self.num_experts else ()
        first = (self.in_size, rank) if self.is_embedding else (self.num_slices * rank, self.in_size)
        return (*experts, *first), (*experts, self.out_size, rank)

    def padded(self, lora_a: Any, lora_b: Any, rank: int, xp: Any) -> tuple[Any, Any]:
        """Returns an adapter's matrices filled up with zeros to a rank, by numpy or jax.numpy."""
        more = (0, rank - lora_b.shape[-1])
        if self.is_embedding:
            first = xp.pad(lora_a, ((0, 0), more))
        else:
            apart = lora_a.reshape(-1, lora_b.shape[-1], self.in_size)
            first = xp.pad(apart, ((0, 0), more, (0, 0))).reshape(self.shapes(rank)[0])
        return first, xp.pad(lora_b, (*[(0, 0)] * (lora_b.ndim - 1), more))


@functools.lru_cache(maxsize=16)
def adapter_targets(config: ModelConfig) -> tuple[AdapterTarget, ...]:
    """Returns the parts of a decoder that adapters may change, layer by layer, then embedding and head.

    Those of the layers are all their linear ones; convolutions and norms have none.

    Example:
        >>> config = ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        ...                      num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        >>> [(target.module, target.num_slices) for target in adapter_targets(config)[:3]]
        [('mlp.down_proj', 1), ('mlp.gate_up_proj', 2), ('self_attn.o_proj', 1)]
        >>> [target.module for target in adapter_targets(config)[3:]]
        ['self_attn.qkv_proj', 'embed_tokens', 'lm_head']
    """
    if config.encoder is not None or config.is_encoder:
        raise Unsupported("config", "has an encoder", "adapters are for decoders")
    shapes, found = parameter_shapes(config), []
    for path, shape in shapes.items():
        if path[0] != "layers" or path[-1] != "kernel":
            continue
        layer, module = int(path[1]), ".".join(map(str, path[2:-1]))
        *experts, in_size, out_size = shape
        sizes = joined_sizes(module, out_size, config.of_layer(layer))
        found.append(AdapterTarget(layer, module, path, in_size, out_size, sizes, *experts))
    vocab_size, hidden_size = shapes[_EMBEDDING_PATH]
    head: ParameterPath = _EMBEDDING_PATH if config.tie_word_embeddings else (HEAD, "kernel")
    found.append(AdapterTarget(None, EMBEDDING, _EMBEDDING_PATH, vocab_size, hidden_size, (hidden_size,)))
    found.append(AdapterTarget(None, HEAD, head, hidden_size, vocab_size, (vocab_size,)))
    return tuple(found)


def chosen_targets(
    config: ModelConfig, names: Sequence[str] | None, argument: str = "target_modules"
) -> tuple[AdapterTarget, ...]:
    """Returns the targets with one of the names: a module's last one or more. None is for all of the layers, without
    routers, gates of experts, and indexers.

    Raises:
        InvalidInput: a name that no module has; `argument` is where it was given.
    """
    targets = adapter_targets(config)
    if names is None:
        return tuple(target for target in targets if target.layer is not None and not target.is_choice)
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(argument, value=names, wanted="it must be a list of names")
    for name in names:
        if not any(_has_name(target, name) for target in targets):
            known = sorted({target.module for target in targets})
            raise InvalidInput(argument, f"has {shown(name)}", f"this model has {', '.join(known)}")
    return tuple(target for target in targets if any(_has_name(target, name) for name in names))


def _has_name(target: AdapterTarget, name: str) -> bool:
    known = (target.module, *_ALSO_NAMED.get(target.module, ()))
    if target.module == MAMBA_IN and target.num_slices > 1:
        known += (QKV,)
    return any(f".{each}".endswith(f".{name}") for each in known)
