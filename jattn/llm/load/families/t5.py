"""T5 and FLAN-T5 (arXiv:1910.10683): an encoder and a decoder, biases by distance, scores without a scale."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import Family, Key, Raw, attention_names, stack_names

_DISTANCES = ("relative_attention_num_buckets", "relative_attention_max_distance")
_BIASES = "block.0.layer.0.SelfAttention.relative_attention_bias"
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gated-gelu": "gelu_new", "gated-silu": "silu"}
_FEED_FORWARDS = {activation: name for name, activation in _ACTIVATIONS.items()}


def _t5(raw: Raw) -> dict[str, Any]:
    # Older files say it by the output projection: T5 shares the embedding and scales, version 1.1 does neither.
    given = raw.get("scale_decoder_outputs")
    scales = raw["tie_word_embeddings"] if given is None else given
    return {
        "gated_mlp": str(raw["feed_forward_proj"]).startswith("gated-"),
        "logits_scale": raw["d_model"] ** -0.5 if scales else 1.0,
    }


def _feed_forward(part: str, layer: int) -> dict[str, str | tuple[str, ...]]:
    where = f"layer.{layer}.DenseReluDense."
    return {
        f"{part}post_attention_layernorm": f"layer.{layer}.layer_norm",
        f"{part}mlp.up_proj": f"{where}wi",
        f"{part}mlp.gate_up_proj": (f"{where}wi_0", f"{where}wi_1"),
        f"{part}mlp.down_proj": f"{where}wo",
    }


T5 = Family(
    architecture="T5ForConditionalGeneration",
    model_type="t5",
    keys={
        "d_model": "hidden_size",
        "d_kv": "head_dim",
        "d_ff": "intermediate_size",
        "num_layers": "encoder.num_hidden_layers",
        "num_decoder_layers": Key("num_hidden_layers", default=lambda raw: raw["num_layers"]),
        "num_heads": "num_attention_heads",
        "n_positions": Key("max_position_embeddings", default=512),
        "layer_norm_epsilon": "rms_norm_eps",
        "feed_forward_proj": Key("hidden_act", lambda name: _ACTIVATIONS.get(str(name), name), _FEED_FORWARDS.get),
        "scale_decoder_outputs": Key("logits_scale", write=lambda scale: scale != 1),
    }
    | {name: name for name in ("decoder_start_token_id", "forced_bos_token_id", *_DISTANCES)},
    defaults={"feed_forward_proj": "relu", "tie_word_embeddings": True, "eos_token_id": 1, "decoder_start_token_id": 0},
    options={"position_embedding": "relative", "attention_scale": 1.0},
    derive=_t5,
    absent=("num_key_value_heads",),
    inert={"is_encoder_decoder": True},
    names={"embed_tokens": "shared"}
    | {"input_layernorm": "layer.0.layer_norm", "cross_attention_norm": "layer.1.layer_norm"}
    | attention_names("self_attn", "layer.0.SelfAttention", "qkvo")
    | attention_names("cross_attn", "layer.1.EncDecAttention", "qkvo")
    | _feed_forward("", 2)
    | _feed_forward("encoder.", 1)
    | stack_names({"norm": "final_layer_norm", "relative_attention_bias": _BIASES, "layer": "block.{layer}."}),
    # MADLAD-400's files have the decoder's alone.
    also_spelled={"shared.weight": "decoder.embed_tokens.weight"},
    # The embedding again, and a bias of cross attention that was never used.
    unread=r"(en|de)coder\.embed_tokens\.weight|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)
