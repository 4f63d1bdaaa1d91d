"""Adapters of tiny models with some spread, and models with an adapter merged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jattn.llm.load.plan import plan_parameters
from jattn.llm.models import Adapters, Decoder, ModelConfig, adapter_targets

__all__ = ["PROJECTIONS", "matrices", "merged_model", "peft_folder", "peft_tensors", "tiny_adapters"]

#: The linear layers of a Llama by name in a file.
PROJECTIONS = (
    *(f"self_attn.{each}_proj" for each in "qkvo"),
    *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
)


def tiny_adapters(config: ModelConfig, seed: int, *, rank: int = 4, num_adapters: int = 2, **options: Any) -> Adapters:
    """Returns adapters whose products are as large as the layers' own results."""
    adapters, random = Adapters(config, rank=rank, num_adapters=num_adapters, rngs=nnx.Rngs(seed), **options), seed
    generator = np.random.default_rng(random)
    for layer in adapters.layers:
        for module in layer.values():
            shape = module["lora_b"].shape
            module["lora_b"][...] = jnp.asarray(generator.normal(0, 0.1, shape), config.dtype)
    return adapters


def matrices(adapters: Adapters, index: int) -> dict[tuple[int, str], list[tuple[np.ndarray, np.ndarray]]]:
    """Returns A and scaled B of each joined layer, float64, by layer and module."""
    config, found = adapters.config, {}
    for target in adapter_targets(config):
        if target.module not in adapters.layers[target.layer]:
            continue
        module = adapters.layers[target.layer][target.module]
        first, second = (np.asarray(module[name][...][index], np.float64) for name in ("lora_a", "lora_b"))
        own = np.split(first, target.num_slices)
        keys = config.key_value_size
        ends = {1: [], 2: [target.out_size // 2], 3: [target.out_size - 2 * keys, target.out_size - keys]}
        parts = np.split(second, ends[target.num_slices])
        found[target.layer, target.module] = [(a, b * adapters.scaling) for a, b in zip(own, parts, strict=True)]
    return found


def merged_model(model: Decoder, adapters: Adapters, index: int) -> Decoder:
    """Returns a copy of a model whose kernels have an adapter's products added, in float64."""
    copy = nnx.clone(model)
    for (layer, path), parts in matrices(adapters, index).items():
        module: Any = copy.layers[layer]
        for name in path.split("."):
            module = getattr(module, name)
        added = np.concatenate([(b @ a).T for a, b in parts], axis=1)
        kernel = module.kernel[...]
        module.kernel[...] = jnp.asarray(np.asarray(kernel, np.float64) + added, kernel.dtype)
    return copy


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
        for part, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
            found = generator.normal(0, 0.1, size).astype(np.float32)
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = found
    return tensors


def peft_folder(folder: Path, tensors: Mapping[str, np.ndarray], **changes: Any) -> Path:
    """Writes a folder as PEFT does, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder
