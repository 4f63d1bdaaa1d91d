"""One tiny random checkpoint for each family and each of its options, made by transformers itself."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from tests.support.family_cases import ABSENT, SIZES
from tests.support.family_cases import CASES as FIRST_CASES
from tests.support.newer_family_cases import NEWER_CASES

__all__ = ["ABSENT", "CASES", "LARGER", "SIZES", "VARIANTS", "reference_logits", "write_checkpoint"]

#: The second size of tests in two sizes.
LARGER: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 203}
CASES = {**FIRST_CASES, **NEWER_CASES}
VARIANTS = [(architecture, index) for architecture, (_, options) in CASES.items() for index in range(len(options))]
#: Tensors that transformers reads under the names of published files and writes under others: a pattern, the published
#: name, and a tensor that only layers with this name have.
_AS_PUBLISHED = {
    "OlmoHybridForCausalLM": ("feedforward_layer_norm", "post_attention_layernorm", "self_attn"),
    "KimiLinearForCausalLM": (r"block_sparse_moe\.(?=\w+_proj)", "mlp.", "block_sparse_moe.gate_proj"),
}
#: Families that transformers 5.17 lacks, or computes or writes in another way than 5.23.
_NEWER = {"AXK1ForCausalLM", "BailingHybridForCausalLM", "BambaForCausalLM", "FlintForCausalLM"}
_NEWER |= {"InternLM3ForCausalLM", "Lfm3ForCausalLM", "MiniCPM3ForCausalLM", "MiniMaxM2ForCausalLM"}
#: Options with an entry for each layer, of which a case has the first two.
_BY_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types", "layer_rope_theta", "num_attention_heads_per_layer")
_BY_LAYER += ("indexer_types", "attention_types")
#: Tensors that transformers writes and computes again if they are missing.
_COMPUTED = r".*self_attn\.(query|key|diagonal)_decay"
_NORMS = tuple(f"{name}.weight" for name in ("norm", "layernorm", "ln_1", "ln_2", "ln_f", "ln_attn", "ln_mlp"))
_NORMS += ("layer_scalar", "per_expert_scale", "layernorm_1.weight", "layernorm_2.weight")
#: Float32 runs of models with norms of small results, which enlarge roundings.
_RUNS_OF_SMALL_RESULTS = 5


def write_checkpoint(folder: Path, architecture: str, variant: int, seed: int, **sizes: Any) -> Path:
    """Writes a checkpoint as transformers saves it, with weights large enough that every option shows."""
    import torch
    import transformers

    if architecture in _NEWER and Version(transformers.__version__) < Version("5.23"):
        pytest.skip(f"{architecture} as published needs transformers 5.23 or newer")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    name, variants = CASES[architecture]
    absent = ABSENT.get(architecture, ())
    common = {key: value for key, value in (SIZES | sizes).items() if key not in absent}
    options = common | variants[variant]
    if (options.get("kv_lora_rank") and options["num_key_value_heads"] is not None) or "index_topk" in options:
        # Latents are shared by all heads; some classes do not work this number out.
        options["num_key_value_heads"] = options["num_attention_heads"]
    for key in _BY_LAYER:
        if key in options:
            options[key] = [options[key][layer % 2] for layer in range(options["num_hidden_layers"])]
    config = getattr(transformers, name)(**options)
    # Of InternLM 3 there is a config alone; its layers are Llama's.
    model = getattr(transformers, architecture, transformers.AutoModelForCausalLM.from_config)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = (
            entry for entry in model.named_buffers() if entry[0].endswith(("e_score_correction_bias", "layer_scalar"))
        )
        for path, parameter in (*model.named_parameters(), *biases):
            centre = 1.0 if path.endswith(_NORMS) else 0.0
            parameter.copy_(centre + 0.15 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [architecture]}))
    if architecture == "MiniMaxForCausalLM":
        _without(folder / "model.safetensors", _COMPUTED)
    if architecture in _AS_PUBLISHED:
        _rename(folder / "model.safetensors", *_AS_PUBLISHED[architecture])
    return folder


def _without(file: Path, pattern: str) -> None:
    """Takes tensors out of a file."""
    from safetensors.torch import load_file, save_file

    save_file(
        {each: tensor for each, tensor in load_file(file).items() if not re.fullmatch(pattern, each)},
        file,
        {"format": "pt"},
    )


def _rename(file: Path, pattern: str, name: str, neighbour: str) -> None:
    """Renames tensors of a file, in the layers that have a neighbour."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    layers = {each.split(neighbour)[0] for each in tensors if neighbour in each}
    named = {each: re.sub(pattern, name, each) if each.startswith(tuple(layers)) else each for each in tensors}
    save_file({named[each]: tensor for each, tensor in tensors.items()}, file, {"format": "pt"})


def reference_logits(folder: Path, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns transformers' logits [batch, tokens, vocab_size] in float64 arithmetic and in float32.

    A norm divides results of a delta rule, or of experts, by their size, which may be small: errors of two float32 runs
    may be an order of magnitude apart. For these models the second ones are the furthest from the first, of runs whose
    weights differ by a unit in the last place.
    """
    from tests.support.tiny_models import transformers_logits, transformers_runs

    exact = transformers_logits(folder, token_ids, "float64")
    config = json.loads((folder / "config.json").read_text())
    count = _RUNS_OF_SMALL_RESULTS if {"linear_conv_kernel_dim", "per_layer_config"} & {*config} else 1
    runs = itertools.islice(transformers_runs(folder, token_ids), count)
    return exact, max(runs, key=lambda logits: np.abs(logits - exact).max())
