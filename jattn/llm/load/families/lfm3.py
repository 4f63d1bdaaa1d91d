"""LFM3: LFM2's layers with gated attention, windows in some, and a norm on both sides of each branch."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.family import BOTH_BIASES, Key, Raw
from jattn.llm.load.families.lfm2 import LFM2


def _layer_types(raw: Raw) -> list[str]:
    kinds = {2: "full_attention", 0: "sliding_attention"}
    return [kinds.get(layer % 4, "conv") if layer else "conv" for layer in range(raw["num_hidden_layers"])]


LFM3 = replace(
    LFM2,
    architecture="Lfm3ForCausalLM",
    model_type="lfm3",
    keys={
        "norm_eps": Key("rms_norm_eps", default=1e-5),
        "conv_L_cache": Key("short_conv.conv_size", default=7),
        "conv_bias": Key("short_conv.use_bias", default=False),
        "attention_bias": BOTH_BIASES,
        "use_attention_gate": Key("attn_head_gate", default=True),
        "use_sandwich_norm": Key("norm_placement", lambda both: "both" if both else "before", lambda at: at == "both"),
    },
    defaults={
        "tie_word_embeddings": True,
        "head_dim": 128,
        "sliding_window": 256,
        "use_sandwich_norm": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 1e4},
        },
    },
    derive=None,
    derived={},
    aliases={"rms_norm_eps": "norm_eps"},
    inert={},
    default_types=_layer_types,
    windows=lambda layer, raw: _layer_types(raw)[layer] == "sliding_attention",
    rope_keys={"rope_local_base_freq": "rope_parameters"},
    names={
        **{name: file for name, file in LFM2.names.items() if not name.startswith("self_attn.")},
        "attention_output_norm": "post_operator_norm",
        "mlp_output_norm": "post_ffn_norm",
    },
    # transformers' modules.
    also_spelled={".self_attn.gate_proj.": ".self_attn.g_proj."},
)
