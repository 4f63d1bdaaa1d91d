"""Gemma 1 (arXiv:2403.08295) and 2 (arXiv:2408.00118)."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, INVERSE_SQUARE, Family, Key, Raw, every
from jattn.llm.load.families.gguf import Gguf


def scaled_embedding(raw: Raw) -> dict[str, Any]:
    """Returns the factor that all of them put on embeddings."""
    return {"embedding_multiplier": raw["hidden_size"] ** 0.5}


KEYS = {
    "attention_bias": BOTH_BIASES,
    "hidden_activation": "hidden_act",
    "query_pre_attn_scalar": Key("attention_scale", *INVERSE_SQUARE),
    **{name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
}
NAMES = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
INERT = {"use_bidirectional_attention": False}


def scale_of_gguf(largest: int) -> dict[str, Any]:
    """Returns the key that GGUF files leave out: in the largest model of a generation it is not head_dim."""

    def scalar(raw: Raw) -> Any:
        is_largest = raw["num_hidden_layers"] == largest
        return raw["hidden_size"] // raw["num_attention_heads"] if is_largest else raw["head_dim"]

    return {"query_pre_attn_scalar": scalar}


#: hidden_activation is read in its place.
IGNORED = ("hidden_act",)

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
    derive=scaled_embedding,
    inert=INERT,
    ignored=("hidden_activation",),
    gguf=Gguf(architecture="gemma", norm_offset=1.0),
)

GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    keys=KEYS,
    defaults=DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    options={"norm_type": "gemma_rms_norm", "norm_placement": "both"},
    derive=scaled_embedding,
    inert=INERT,
    ignored=(*IGNORED, "sliding_window_size"),
    windows=every(2),
    names=NAMES,
    gguf=Gguf(architecture="gemma2", values=scale_of_gguf(46), norm_offset=1.0),
)
