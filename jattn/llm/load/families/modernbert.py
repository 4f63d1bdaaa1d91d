"""ModernBERT (arXiv:2412.13663): an encoder with windows in two of three layers, rotary embedding and gated GELU."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.family import BOTH_BIASES, Family, Key
from jattn.llm.load.families.labels import with_labels

_HEAD = ("classifier_activation", "classifier_bias", "classifier_pooling")
# Of training, of kernels and of the head that predicts masked tokens; position_embedding_type is BERT's.
_UNUSED = """
cls_token_id decoder_bias deterministic_flash_attn initializer_cutoff_factor layer_norm_eps mlp_dropout
position_embedding_type reference_compile repad_logits_with_grad sparse_pred_ignore_index sparse_prediction
"""

MODERNBERT = Family(
    architecture="ModernBertModel",
    model_type="modernbert",
    keys={
        "attention_bias": BOTH_BIASES,
        "hidden_activation": Key("hidden_act", default="gelu"),
        "mlp_bias": "mlp_bias",
        "norm_bias": Key("norm_bias", default=False),
        "norm_eps": Key("rms_norm_eps", default=1e-5),
    },
    defaults={
        "attention_bias": False,
        "tie_word_embeddings": True,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
    },
    options={"is_encoder": True, "norm_type": "layer_norm", "embedding_norm": True, "first_layer_norm": False},
    derived={"local_attention": 128, "global_attn_every_n_layers": 3},
    absent=("head_dim", "num_key_value_heads"),
    ignored=(*_HEAD, *_UNUSED.split()),
    also=("ModernBertForMaskedLM",),
    windows=lambda layer, raw: bool(layer % raw["global_attn_every_n_layers"]),
    two_sided_window="local_attention",
    rope_keys={"rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta"},
    names={
        "embed_tokens": "model.embeddings.tok_embeddings",
        "embedding_norm": "model.embeddings.norm",
        "input_layernorm": "attn_norm",
        "self_attn.qkv_proj": "attn.Wqkv",
        "self_attn.o_proj": "attn.Wo",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_up_proj": "mlp.Wi",
        "mlp.down_proj": "mlp.Wo",
        "norm": "model.final_norm",
    },
    unread=r"(head|decoder)\..+",
)

_LABELS = with_labels(MODERNBERT, "ModernBertForSequenceClassification", "head.dense", "classifier")
MODERNBERT_CLASSIFIER = replace(
    _LABELS,
    keys={**_LABELS.keys, **dict(zip(_HEAD, ("pooler_act", "pooler_bias", "label_pooling"), strict=True))},
    defaults={
        **_LABELS.all_defaults,
        "classifier_activation": "gelu",
        "classifier_bias": False,
        "classifier_pooling": "cls",
    },
    options={**_LABELS.options, "pooler_norm": True},
    ignored=tuple(_UNUSED.split()),
    names={**_LABELS.names, "pooler_norm": "head.norm"},
)
