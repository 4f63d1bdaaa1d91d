"""Gemma 1 (arXiv:2403.08295), 2 (arXiv:2408.00118) and the text models of 3 (arXiv:2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jattn.load.families.family import BOTH_BIASES, INVERSE_SQUARE, Family, Key, every

__all__ = ["GEMMA", "GEMMA2", "GEMMA3"]


def _scaled_embedding(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"embedding_multiplier": raw["hidden_size"] ** 0.5}


def _pattern(layer: int, raw: Mapping[str, Any]) -> bool:
    return every(raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6)))(layer, raw)


_KEYS = {
    "attention_bias": BOTH_BIASES,
    "hidden_activation": "hidden_act",
    "query_pre_attn_scalar": Key("attention_scale", *INVERSE_SQUARE),
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_NAMES = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_INERT = {"use_bidirectional_attention": False}

GEMMA = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    # The first files say "gelu" and mean its approximation; transformers reads them so.
    keys={
        "attention_bias": BOTH_BIASES,
        "hidden_act": Key("hidden_act", lambda name: "gelu_pytorch_tanh" if name == "gelu" else name),
    },
    defaults={"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256},
    options={"norm_type": "gemma_rms_norm"},
    derive=_scaled_embedding,
    inert=_INERT,
)

GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    keys=_KEYS,
    defaults=_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    options={"norm_type": "gemma_rms_norm", "norm_placement": "both"},
    derive=_scaled_embedding,
    inert=_INERT,
    windows=every(2),
    names=_NAMES,
)

GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    keys={name: key for name, key in _KEYS.items() if name != "attn_logit_softcapping"},
    defaults=_DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 10000.0},
    options={"norm_type": "gemma_rms_norm", "norm_placement": "both", "qk_norm": "head"},
    derive=_scaled_embedding,
    # transformers reads the key and caps nothing.
    inert=_INERT | {"attn_logit_softcapping": None},
    windows=_pattern,
    rope_keys={"rope_local_base_freq": "rope_local_base_freq"},
    names=_NAMES,
)
