"""The text models of Gemma 3 (arXiv:2503.19786): norms on queries and keys, a base of rotation by kind of layer."""

from __future__ import annotations

from jattn.llm.load.families.family import Family, Raw, Whole, every
from jattn.llm.load.families.gemma import DEFAULTS, IGNORED, INERT, KEYS, NAMES, scale_of_gguf, scaled_embedding
from jattn.llm.load.families.gguf import Gguf


def _pattern(layer: int, raw: Raw) -> bool:
    return every(raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6)))(layer, raw)


GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    keys={name: key for name, key in KEYS.items() if name != "attn_logit_softcapping"},
    defaults=DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 10000.0},
    options={"norm_type": "gemma_rms_norm", "norm_placement": "both", "qk_norm": "head"},
    derive=scaled_embedding,
    # transformers reads the key and caps nothing.
    inert=INERT | {"attn_logit_softcapping": None},
    ignored=IGNORED,
    windows=_pattern,
    rope_keys={"rope_local_base_freq": "rope_local_base_freq"},
    names=NAMES,
    gguf=Gguf(architecture="gemma3", values=scale_of_gguf(62), norm_offset=1.0),
    whole=Whole(
        architecture="Gemma3ForConditionalGeneration",
        model_type="gemma3",
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
    ),
)
