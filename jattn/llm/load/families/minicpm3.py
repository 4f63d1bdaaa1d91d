"""MiniCPM3: attention over latents with pairs of halves, and scales of embedding, residuals and logits."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.deepseek_v2 import LATENT_KEYS
from jattn.llm.load.families.family import BOTH_BIASES, Family, Key, Raw
from jattn.llm.models.config import ModelConfig


def _scales(raw: Raw) -> dict[str, Any]:
    depth, base, layers = raw.get("scale_depth"), raw.get("dim_model_base"), raw["num_hidden_layers"]
    return {
        "head_dim": raw["qk_rope_head_dim"],
        "residual_multiplier": 1.0 if depth is None else depth / layers**0.5,
        "logits_scale": 1.0 if base is None else base / raw["hidden_size"],
    }


def _written(config: ModelConfig) -> dict[str, Any]:
    root, base = config.num_hidden_layers**0.5, config.logits_scale * config.hidden_size
    depth = config.residual_multiplier * root
    short = float(f"{depth:.12g}")
    return {
        "scale_depth": short if short / root == config.residual_multiplier else depth,
        "dim_model_base": round(base, 6),
    }


MINICPM3 = Family(
    architecture="MiniCPM3ForCausalLM",
    model_type="minicpm3",
    keys=LATENT_KEYS
    | {"attention_bias": BOTH_BIASES, "mlp_bias": "mlp_bias", "scale_emb": Key("embedding_multiplier", default=12)},
    defaults={
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": lambda raw: raw["hidden_size"] // raw["num_attention_heads"],
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    options={"latent.rope_interleave": False},
    derive=_scales,
    write=_written,
    derived={"scale_depth": None, "dim_model_base": None},
    absent=("head_dim",),
    ignored=("head_dim",),
    brings_code=True,
)
