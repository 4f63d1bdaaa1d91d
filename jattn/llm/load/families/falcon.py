"""Falcon (arXiv:2311.16867): one key/value head or a few, rotary or ALiBi, attention and feed-forward side by side."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import WITHOUT_GATE, Family, Key, Raw
from jattn.llm.load.families.gpt_neox import BLOOM_NAMES
from jattn.llm.models.config import ModelConfig


def _falcon(raw: Raw) -> dict[str, Any]:
    heads = raw["num_attention_heads"]
    if raw["new_decoder_architecture"]:
        norms = raw.get("num_ln_in_parallel_attn") or 2
        kv_heads, block = raw.get("num_kv_heads") or heads, "two_norms" if norms == 2 else "shared_norm"
    else:
        kv_heads = 1 if raw["multi_query"] else heads
        block = "shared_norm" if raw["parallel_attn"] else None
    # It adds ALiBi before it scales the scores.
    scale = (raw["hidden_size"] // heads) ** -0.5 if raw["alibi"] else 1.0
    return {"num_key_value_heads": kv_heads, "parallel_block": block, "alibi_scale": scale}


def _falcon_norms(config: ModelConfig) -> dict[str, str]:
    if config.parallel_block != "two_norms":
        return {}
    return {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}


FALCON = Family(
    architecture="FalconForCausalLM",
    model_type="falcon",
    keys={
        "activation": Key("hidden_act", default="gelu"),
        "bias": Key(("attention_bias", "attention_output_bias", "mlp_bias"), default=False),
        "ffn_hidden_size": Key("intermediate_size", default=lambda raw: 4 * raw["hidden_size"]),
        "layer_norm_epsilon": Key("rms_norm_eps", default=1e-5),
        "alibi": Key("position_embedding", lambda used: "alibi" if used else "rope", lambda kind: kind == "alibi"),
        "num_kv_heads": "num_key_value_heads",
        "multi_query": Key("num_key_value_heads", write=lambda heads: heads == 1, default=True),
        # With parallel attention the new architecture computes the same as the old one.
        **dict.fromkeys(("new_decoder_architecture", "parallel_attn"), Key("parallel_block", write=bool)),
        "num_ln_in_parallel_attn": Key("parallel_block", write=lambda kind: 1 + (kind == "two_norms")),
    },
    defaults={
        "alibi": False,
        "new_decoder_architecture": False,
        "parallel_attn": True,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    options=WITHOUT_GATE,
    derive=_falcon,
    absent=("head_dim",),
    aliases={"n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"},
    ignored=("ff_factor",),
    inert={"apply_residual_connection_post_layernorm": False},
    names=BLOOM_NAMES,
    names_of=_falcon_norms,
    order={"self_attn.qkv_proj": "by_group"},
    brings_code=True,
)
