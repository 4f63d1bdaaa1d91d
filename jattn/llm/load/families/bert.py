"""BERT (arXiv:1810.04805): an encoder with norms after each sum; of a pair of texts the first kind of token only."""

from __future__ import annotations

from jattn.llm.load.families.family import Family

BERT = Family(
    architecture="BertModel",
    model_type="bert",
    keys={"layer_norm_eps": "rms_norm_eps", "type_vocab_size": "token_types"},
    defaults={"layer_norm_eps": 1e-12, "type_vocab_size": 2, "hidden_act": "gelu", "tie_word_embeddings": True},
    options={
        "is_encoder": True,
        "final_norm": False,
        "norm_type": "layer_norm",
        "norm_bias": True,
        "norm_placement": "residual",
        "embedding_norm": True,
        "position_embedding": "learned",
        "gated_mlp": False,
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    },
    absent=("head_dim", "num_key_value_heads"),
    ignored=(
        "directionality",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ),
    inert={"position_embedding_type": "absolute"},
    also=("BertForMaskedLM",),
    names={
        "embed_tokens": "bert.embeddings.word_embeddings",
        "position_embedding": "bert.embeddings.position_embeddings",
        "token_type_embedding": "bert.embeddings.token_type_embeddings",
        "embedding_norm": "bert.embeddings.LayerNorm",
        "layer": "bert.encoder.layer.{layer}.",
        "self_attn.qkv_proj": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "self_attn.o_proj": "attention.output.dense",
        "attention_output_norm": "attention.output.LayerNorm",
        "mlp.up_proj": "intermediate.dense",
        "mlp.down_proj": "output.dense",
        "mlp_output_norm": "output.LayerNorm",
    },
    prefix="bert.",
    unread=r"(bert\.)?(pooler|cls)\..+|.*position_ids",
)
