"""save_adapter: an adapter from memory to a folder of PEFT, under the names of the checkpoint's layers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from jattn.llm.load.adapter_config import NAME as CONFIG_FILE
from jattn.llm.load.adapter_experts import expert_tensors, wrapped_name
from jattn.llm.load.adapter_pieces import pieces_of, split
from jattn.llm.load.adapter_state import adapter_of
from jattn.llm.load.adapters import ADAPTER_FILE, finite
from jattn.llm.load.save import write_file, write_json
from jattn.llm.load.tensor_file import STORED_DTYPES
from jattn.llm.models import ModelConfig
from torch_core.adapters.call import MAX_RANK
from torch_core.base.errors import InvalidInput, Unsupported


def save_adapter(
    folder: str | os.PathLike[str],
    adapter: Any,
    config: ModelConfig,
    *,
    index: int = 0,
    alpha: float | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a folder of PEFT that `Engine.add_lora`, `--lora-modules` and PEFT read.

    Layers that are one product here are written apart, as the checkpoint has them. The scale is multiplied into the
    second matrices, so that lora_alpha is r. The matrices keep their dtype. adapter_config.json comes last: a folder
    that has it is whole.

    Args:
        folder: the folder to write, created if it does not exist.
        adapter: `jattn.llm.models.Adapters`, or an nnx module, its state or a mapping of arrays, as `Engine.add_lora`
            takes it.
        config: config of the model that it is for.
        index, alpha: as in `Engine.add_lora`.
        overwrite: replace the adapter in a folder that is not empty.

    Raises:
        InvalidInput: the folder is not empty, the adapter is not of the model, or its numbers are not finite; or layers
            that are one in the checkpoint need a rank above 256 together.
        Unsupported: matrices of another dtype than float32, bfloat16 and float16.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from jattn.llm.models import Adapters
        >>> config = ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        ...                      num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapter(folder, Adapters(config, rank=4, rngs=nnx.Rngs(0)), config)
        ...     sorted(os.listdir(folder))
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    if not isinstance(config, ModelConfig):
        wanted = "the order is save_adapter(folder, adapter, config)"
        raise InvalidInput("config", f"is a {type(config).__name__}", wanted)
    found = adapter_of(adapter, config, index=index, alpha=alpha, keeps_dtype=True)
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise InvalidInput("folder", f"{str(path)!r} is a file", "name a folder")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise InvalidInput("folder", f"{str(path)!r} is not empty", "overwrite=True replaces the adapter in it")
    with_down = {target.layer for target in found.weights if target.module == "moe.down_proj"}
    tensors: dict[str, Any] = {}
    ranks: dict[str, int] = {}
    modules: set[str] = set()
    parameters: set[str] = set()
    for name, piece in pieces_of(config).items():
        if (weights := found.weights.get(piece.target)) is None:
            continue
        pair = split(piece, weights)
        first, second = pair.lora_a, pair.lora_b
        # A layer of joined ones that has no adapter.
        if not (first.any() or second.any()):
            continue
        if (rank := second.shape[-1]) > MAX_RANK:
            wanted = f"its layers have first matrices of their own, and it may be {MAX_RANK}. Train with a smaller rank"
            raise InvalidInput(f"the rank of {name}", f"is {rank}", wanted)
        module = spelt = name
        if piece.num_experts:
            first, second = expert_tensors(first, second)
            module = wrapped_name(name, with_down=piece.target.layer in with_down)
        if piece.num_experts or piece.target.is_choice:
            # PEFT has no adapters of modules with experts, or of routers, but of their parameters.
            spelt = name if module != name else f"{name}.weight"
            parameters.add(".".join(spelt.split(".")[-2:]))
        else:
            modules.add(name.rpartition(".")[2])
        if rank != found.rank:
            ranks[spelt] = ranks[spelt.removesuffix(".weight")] = rank
        for part, matrix in (("A", first), ("B", second)):
            key = f"embedding_{part}" if piece.target.is_embedding else f"{part}.weight"
            if matrix.dtype not in STORED_DTYPES.values():
                wanted = f"matrices of adapters may be {', '.join(map(str, STORED_DTYPES.values()))}"
                raise Unsupported(name, f"has the dtype {matrix.dtype}", wanted)
            tensors[f"base_model.model.{module}.lora_{key}"] = finite(name, matrix).copy()
    if not tensors:
        raise InvalidInput("adapter", "is 0 everywhere", "train it, or leave it out")
    described = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True,
        "auto_mapping": {"base_model_class": config.architecture, "parent_library": "transformers"},
        "r": found.rank, "lora_alpha": found.rank, "rank_pattern": ranks, "alpha_pattern": ranks,
        "target_modules": sorted(modules), "target_parameters": sorted(parameters, reverse=True) or None,
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    # A reader of a folder that is written again finds no adapter, and never parts of two.
    (path / CONFIG_FILE).unlink(missing_ok=True)
    write_file(path / ADAPTER_FILE, save(tensors, metadata={"format": "pt"}))
    write_json(path / CONFIG_FILE, described)
