"""BART (arXiv:1910.13461): an encoder and a decoder with learned positions and norms after each sum."""

from __future__ import annotations

from jattn.llm.load.families.bert import SUM_NORMS
from jattn.llm.load.families.family import Family, Key, attention_names, stack_names

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
# Keys that only models derived from BART have.
_OFF = ("normalize_before", "add_final_layer_norm", "static_position_embeddings")

BART = Family(
    architecture="BartForConditionalGeneration",
    model_type="bart",
    keys={
        "d_model": "hidden_size",
        "encoder_layers": "encoder.num_hidden_layers",
        "encoder_ffn_dim": "encoder.intermediate_size",
        "encoder_attention_heads": Key(("encoder.num_attention_heads", "encoder.num_key_value_heads")),
        "decoder_layers": "num_hidden_layers",
        "decoder_ffn_dim": "intermediate_size",
        "decoder_attention_heads": "num_attention_heads",
        "activation_function": Key("hidden_act", default="gelu"),
        "scale_embedding": Key("embedding_multiplier", write=lambda scale: scale != 1),
        **{name: name for name in ("decoder_start_token_id", "forced_bos_token_id")},
    },
    defaults={
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "forced_eos_token_id": 2,
        "decoder_start_token_id": 2,
    },
    options={**SUM_NORMS, "rms_norm_eps": 1e-5, "position_offset": 2, "logits_bias": True},
    derive=lambda raw: {"embedding_multiplier": raw["d_model"] ** 0.5 if raw.get("scale_embedding") else 1.0},
    absent=("head_dim", "num_key_value_heads"),
    inert={"is_encoder_decoder": True, "normalize_embedding": True} | dict.fromkeys(_OFF, False),
    # The encoder's again.
    ignored=("num_hidden_layers",),
    names={
        "embed_tokens": "model.shared",
        "attention_output_norm": "self_attn_layer_norm",
        "cross_attention_norm": "encoder_attn_layer_norm",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
        "mlp_output_norm": "final_layer_norm",
    }
    | attention_names("self_attn", "self_attn", _PROJECTIONS)
    | attention_names("cross_attn", "encoder_attn", _PROJECTIONS)
    | stack_names(
        {"layer": "layers.{layer}.", "position_embedding": "embed_positions", "embedding_norm": "layernorm_embedding"},
        "model.",
    ),
    # The embedding again, and a number that old writers left.
    unread=r"model\.(en|de)coder\.(embed_tokens\.weight|version)",
)
