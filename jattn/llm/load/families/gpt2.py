"""GPT-2, and StarCoder 2 (arXiv:2402.19173): layer norms with a bias and a plain feed-forward part."""

from __future__ import annotations

from jattn.llm.load.families.family import BIASES, WITHOUT_GATE, Family, Key
from jattn.llm.load.families.gguf import Gguf

GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    keys={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": Key("intermediate_size", default=lambda raw: 4 * raw["n_embd"]),
        "activation_function": Key("hidden_act", default="gelu_new"),
        "layer_norm_epsilon": Key("rms_norm_eps", default=1e-5),
    },
    defaults={"tie_word_embeddings": True},
    options=WITHOUT_GATE | BIASES | {"position_embedding": "learned"},
    absent=("head_dim", "num_key_value_heads"),
    inert={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    ignored=("n_special", "predict_special_tokens"),
    names={
        "embed_tokens": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "norm": "transformer.ln_f",
        "layer": "transformer.h.{layer}.",
        "self_attn.qkv_proj": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    },
    prefix="transformer.",
    in_out=True,
    gguf=Gguf(architecture="gpt2", names={"self_attn.qkv_proj": "attn_qkv"}, pre_tokenizer="gpt-2"),
)

STARCODER2 = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    keys={"norm_epsilon": "rms_norm_eps", "use_bias": Key(tuple(BIASES))},
    defaults={"norm_epsilon": 1e-5, "use_bias": True, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    options=WITHOUT_GATE,
    windows="all",
    ignored=(
        "activation_function",
        "layer_norm_epsilon",
        "mlp_type",
        "norm_type",
        "scale_attention_softmax_in_fp32",
        "scale_attn_weights",
    ),
    names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
    gguf=Gguf(architecture="starcoder2", pre_tokenizer="starcoder"),
)
