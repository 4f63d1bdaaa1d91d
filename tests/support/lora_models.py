"""Adapters of tiny models with some spread, and models with an adapter merged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jattn.llm.load.plan import plan_parameters
from jattn.llm.models import Adapters, AdapterTarget, Decoder, ModelConfig, MoEConfig, adapter_targets, decoder_of
from jattn.llm.models.mixers import DeltaNetConfig, KimiDeltaConfig, LightningConfig, MambaConfig, ShortConvConfig
from jattn.llm.models.parts import LatentConfig

__all__ = [
    "GATED",
    "LATENT",
    "PROJECTIONS",
    "STATES",
    "fused_tensors",
    "matrices",
    "merged_model",
    "peft_folder",
    "peft_tensors",
    "tiny_adapters",
]

_ROUTED = MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=8, shared_intermediate_size=16)
#: Changes of a tiny config: attention with a gate, beside the delta rule; latent attention; all layers with a state.
GATED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ("linear_attention", "attention"),
    "delta_net": DeltaNetConfig(num_heads=8, num_kv_heads=4, key_dim=6, value_dim=5),
    "attn_output_gate": True,
    "num_key_value_heads": 4,
    "moe": _ROUTED,
}
LATENT: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "latent": LatentConfig(kv_lora_rank=16, q_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6),
}
STATES: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": ("conv", "linear_attention", "kimi_delta_attention", "lightning_attention", "attention_mamba"),
    "short_conv": ShortConvConfig(use_bias=True),
    "kimi_delta": KimiDeltaConfig(num_heads=4, head_dim=6),
    "lightning": LightningConfig(num_heads=4, head_dim=6),
    "mamba": MambaConfig(num_heads=8, head_dim=4, state_size=6, num_groups=2, use_bias=True, out_bias=True),
    **{name: GATED[name] for name in ("delta_net", "attn_output_gate", "num_key_value_heads")},
}
#: The linear layers of a Llama by name in a file.
PROJECTIONS = (
    *(f"self_attn.{each}_proj" for each in "qkvo"),
    *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
)


def tiny_adapters(config: ModelConfig, seed: int, *, rank: int = 4, num_adapters: int = 2, **options: Any) -> Adapters:
    """Returns adapters whose products are as large as the layers' own results."""
    adapters = Adapters(config, rank=rank, num_adapters=num_adapters, rngs=nnx.Rngs(seed), **options)
    generator = np.random.default_rng(seed)
    for module in (*(module for layer in adapters.layers for module in layer.values()), *adapters.outside.values()):
        for name in ("lora_a", "lora_b"):
            # Those of the embedding begin as zeros and large numbers.
            if name == "lora_b" or not module[name][...].any():
                scale = 0.1 if name == "lora_b" else 1.0
                module[name][...] = jnp.asarray(generator.normal(0, scale, module[name].shape), config.dtype)
    return adapters


def matrices(adapters: Adapters, index: int, xp: Any = np) -> dict[AdapterTarget, list[tuple[Any, Any]]]:
    """Returns A [..., rank, in] and scaled B [..., out, rank] of each joined layer by target: float64 of numpy."""
    config, found = adapters.config, {}
    for target in adapter_targets(config):
        if (module := adapters.of(target)) is None:
            continue
        first, second = (
            xp.asarray(module[name][...][index], np.float64 if xp is np else None) for name in ("lora_a", "lora_b")
        )
        own = [first.T] if target.is_embedding else xp.split(first, target.num_slices, axis=-2)
        parts = xp.split(second, np.cumsum(target.slices)[:-1], axis=-2)
        found[target] = [(a, b * adapters.scaling) for a, b in zip(own, parts, strict=True)]
    return found


def merged_model(model: Decoder, adapters: Adapters, index: int, xp: Any = np) -> Decoder:
    """Returns a copy of a model whose kernels have an adapter's products added; its head is not tied.

    The sum is float64 by numpy, and has derivatives by jax.numpy.
    """
    state: dict[Any, Any] = {path: nnx.as_pure(leaf) for path, leaf in nnx.to_flat_state(nnx.state(model))}
    config = replace(model.config, tie_word_embeddings=False)
    if model.config.tie_word_embeddings:
        state["lm_head", "kernel"] = state["embed_tokens", "embedding"].T
    for target, parts in matrices(adapters, index, xp).items():
        path = ("lm_head", "kernel") if target.module == "lm_head" else target.kernel
        added = xp.concatenate([(b @ a).swapaxes(-1, -2) for a, b in parts], axis=-1)
        state[path] = jnp.asarray(xp.asarray(state[path], added.dtype) + added, state[path].dtype)
    return decoder_of(config, state, model.implementation)


def peft_tensors(
    config: ModelConfig, seed: int, *, r: int = 4, modules: Sequence[str] = PROJECTIONS, ranks: Mapping[str, int] = {}
) -> dict[str, np.ndarray]:
    """Returns the tensors of an adapter under PEFT's names, for the named linear layers of every decoder layer."""
    generator, tensors = np.random.default_rng(seed), {}
    shapes = {piece.name: piece.shape for each in plan_parameters(config) for piece in each.pieces}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(modules)):
            continue
        rank = next((value for key, value in ranks.items() if module.endswith(key)), r)
        is_embedding = module.endswith("embed_tokens")
        sizes = shape if is_embedding else shape[::-1]
        for part, size in (("A", (rank, sizes[0])), ("B", (sizes[1], rank))):
            name = f"lora_embedding_{part}" if is_embedding else f"lora_{part}.weight"
            tensors[f"base_model.model.{module}.{name}"] = generator.normal(0, 0.1, size).astype(np.float32)
    return tensors


def fused_tensors(config: ModelConfig, tensors: Mapping[str, np.ndarray], *, swapped: bool = False) -> Any:
    """Returns experts' matrices as those of a parameter of all experts, by "gate_up_proj" and "down_proj".

    The layout is that of PEFT's ParamWrapper: a row of the first tensor for each expert and rank, a column of the
    second for each rank and expert. `swapped` is the older one, of parameters [experts, out, in]. Gate and up of an
    expert must have the same first matrix.
    """
    moe, where = config.moe, "base_model.model.model.layers.0.mlp.experts"
    assert moe is not None

    def stacked(name: str, part: str) -> np.ndarray:
        return np.stack([tensors[f"{where}.{one}.{name}.lora_{part}.weight"] for one in range(moe.num_experts)])

    seconds = {"gate_up_proj": np.concatenate([stacked("gate_proj", "B"), stacked("up_proj", "B")], axis=1)}
    seconds["down_proj"] = stacked("down_proj", "B")
    found = {}
    for name, second in seconds.items():
        first = stacked(name.replace("gate_up", "up"), "A")
        # The product is the transpose of the transposed matrices' product.
        first, second = (second.swapaxes(1, 2), first.swapaxes(1, 2)) if swapped else (first, second)
        columns = second.transpose(1, 2, 0)
        found[name] = first.reshape(-1, first.shape[2]), columns.reshape(len(columns), -1)
    return found


def peft_folder(folder: Path, tensors: Mapping[str, np.ndarray], **changes: Any) -> Path:
    """Writes a folder as PEFT does, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear", "bias": "none", **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder
