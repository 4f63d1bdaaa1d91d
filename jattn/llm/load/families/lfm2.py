"""LFM2 (arXiv:2511.23404): gated short convolutions, and attention in some layers."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import Family, Key, Raw


def _layer_types(raw: Raw) -> list[str]:
    attending = raw.get("full_attn_idxs")
    layers = range(raw["num_hidden_layers"])
    return ["full_attention" if attending is None or layer in attending else "conv" for layer in layers]


def _feed_forward(raw: Raw) -> dict[str, Any]:
    """Returns the width of the feed-forward part; files give it before it is shrunk and rounded."""
    size, multiple, factor = raw["block_ff_dim"], raw["block_multiple_of"], raw["block_ffn_dim_multiplier"]
    if not raw["block_auto_adjust_ff_dim"]:
        return {}
    size = 2 * size // 3
    return {"intermediate_size": size if factor is None else -(-int(factor * size) // multiple) * multiple}


_INIT = ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")

LFM2 = Family(
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    keys={
        "norm_eps": Key("rms_norm_eps", default=1e-5),
        "block_ff_dim": "intermediate_size",
        "tie_embedding": Key("tie_word_embeddings", default=True),
        "conv_L_cache": Key("short_conv.conv_size", default=3),
        "conv_bias": Key("short_conv.use_bias", default=False),
    },
    defaults={
        "rope_theta": 1e6,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    },
    options={"qk_norm": "head", "hidden_act": "silu"},
    derive=_feed_forward,
    derived={
        "full_attn_idxs": None,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    },
    aliases={"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"},
    # Of training, and sizes and a norm's number that stand elsewhere.
    ignored=(*_INIT, "block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads"),
    inert={"block_use_swiglu": True, "use_pos_enc": True},
    default_types=_layer_types,
    layer_types={"conv": "conv"},
    names={
        "norm": "model.embedding_norm",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.gate_up_proj": ("feed_forward.w1", "feed_forward.w3"),
        "mlp.down_proj": "feed_forward.w2",
    },
)
