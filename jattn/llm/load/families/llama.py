"""Llama 1 to 3, and those that differ in a number or two: Mistral, Granite, SmolLM3, Seed-OSS, Phi-3."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, INVERSE, Family, Key, Raw, Whole, no_rope_layers
from jattn.llm.load.families.gguf import Gguf

_BIASES = {"attention_bias": BOTH_BIASES, "mlp_bias": "mlp_bias"}

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    keys=_BIASES,
    ignored=("activation",),
    gguf=Gguf(architecture="llama", rotates_neighbours=True),
)

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults={"sliding_window": 4096},
    windows="all",
    whole=Whole(architecture="Mistral3ForConditionalGeneration", model_type="mistral3"),
)

GRANITE = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    keys=_BIASES
    | {name: name for name in ("embedding_multiplier", "residual_multiplier")}
    | {"attention_multiplier": "attention_scale", "logits_scaling": Key("logits_scale", *INVERSE)},
    defaults={"attention_multiplier": 1.0},
    gguf=Gguf(architecture="granite", rotates_neighbours=True),
)


def _without_rope(raw: Raw) -> dict[str, Any]:
    layers, interval = raw["num_hidden_layers"], raw.get("no_rope_layer_interval") or 4
    flags = raw.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(layers)]
    return {"nope_layers": tuple(index for index, rotates in enumerate(flags) if not rotates)}


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    keys=_BIASES,
    defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "use_sliding_window": False},
    derive=_without_rope,
    write=no_rope_layers,
    windows=lambda layer, raw: layer in _without_rope(raw)["nope_layers"],
)

# Llama with a switch for each projection's bias.
SEED_OSS = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    keys={name: name for name in ("attention_bias", "mlp_bias")} | {"attention_out_bias": "attention_output_bias"},
    defaults={"attention_bias": True, "head_dim": 128},
)

# Phi-3 (arXiv:2404.14219): fused projections, longrope, a share of each head that rotates.
PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    inert={"lm_head_bias": False},
    ignored=("full_attn_mod", "interpolate_factor"),
    windows="all",
    brings_code=True,
    rope_keys={"partial_rotary_factor": "partial_rotary_factor"},
    names={"self_attn.qkv_proj": "self_attn.qkv_proj", "mlp.gate_up_proj": "mlp.gate_up_proj"},
    gguf=Gguf(architecture="phi3", names={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}),
)
