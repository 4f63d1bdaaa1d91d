"""BERT (arXiv:1810.04805): an encoder with norms after each sum."""

from __future__ import annotations

from jattn.llm.load.families.family import BIASES, WITHOUT_GATE, Family
from jattn.llm.load.families.labels import with_labels

#: Options of encoders with norms after each sum.
SUM_NORMS = {
    **WITHOUT_GATE,
    **BIASES,
    "norm_placement": "residual",
    "final_norm": False,
    "embedding_norm": True,
    "position_embedding": "learned",
}
_POOLER = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")

BERT = Family(
    architecture="BertModel",
    model_type="bert",
    keys={"layer_norm_eps": "rms_norm_eps", "type_vocab_size": "token_types"},
    defaults={"layer_norm_eps": 1e-12, "type_vocab_size": 2, "hidden_act": "gelu", "tie_word_embeddings": True},
    options={**SUM_NORMS, "is_encoder": True},
    absent=("head_dim", "num_key_value_heads"),
    ignored=("directionality", *(f"pooler_{name}" for name in _POOLER)),
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
BERT_CLASSIFIER = with_labels(BERT, "BertForSequenceClassification", "bert.pooler.dense", "classifier")
