"""GPT-NeoX (arXiv:2204.06745) and BLOOM (arXiv:2211.05100): query, key and value lie together by head."""

from __future__ import annotations

from jattn.llm.load.families.family import BIASES, BOTH_BIASES, WITHOUT_GATE, Family, Key

BLOOM_NAMES = {
    "embed_tokens": "transformer.word_embeddings",
    "norm": "transformer.ln_f",
    "layer": "transformer.h.{layer}.",
    "self_attn.qkv_proj": "self_attention.query_key_value",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}

GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    keys={
        "attention_bias": BOTH_BIASES,
        "layer_norm_eps": Key("rms_norm_eps", default=1e-5),
        # One function by two names.
        "hidden_act": Key("hidden_act", lambda name: "gelu_new" if name == "gelu_fast" else name, default="gelu"),
        "use_parallel_residual": Key(
            "parallel_block", lambda used: "two_norms" if used else None, lambda kind: kind is not None
        ),
    },
    defaults={"attention_bias": True, "use_parallel_residual": True, "partial_rotary_factor": 0.25},
    options=WITHOUT_GATE | {"mlp_bias": True},
    absent=("head_dim", "num_key_value_heads"),
    rope_keys={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    names=BLOOM_NAMES
    | {
        "embed_tokens": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
        "layer": "gpt_neox.layers.{layer}.",
        "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
    },
    # transformers' module.
    also_spelled={"embed_out.": "lm_head."},
    order={"self_attn.qkv_proj": "by_group"},
)

BLOOM = Family(
    architecture="BloomForCausalLM",
    model_type="bloom",
    keys={"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "layer_norm_epsilon": "rms_norm_eps"},
    defaults={
        "intermediate_size": lambda raw: 4 * raw["hidden_size"],
        "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    options=WITHOUT_GATE | BIASES | {"position_embedding": "alibi", "embedding_norm": True, "hidden_act": "gelu_new"},
    absent=("head_dim", "num_key_value_heads"),
    aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    inert={"apply_residual_connection_post_layernorm": False},
    names=BLOOM_NAMES | {"embedding_norm": "transformer.word_embeddings_layernorm"},
    prefix="transformer.",
    order={"self_attn.qkv_proj": "by_group"},
)
