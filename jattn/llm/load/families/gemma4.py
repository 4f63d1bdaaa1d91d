"""The text models of Gemma 4: two sizes of heads, values from keys, shared layers, an input of each layer, experts."""

from __future__ import annotations

from jattn.llm.load.families.family import BOTH_BIASES, Family, Whole
from jattn.llm.load.families.gemma import IGNORED, NAMES
from jattn.llm.load.families.gemma3 import GEMMA3
from jattn.llm.load.families.gemma4_files import PATTERN, derived_fields, types_of_layers, written_keys

_LOCAL, _FULL = {"rope_theta": 1e4}, {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
_PARTS = {
    "hidden_size_per_layer_input": "per_layer_input.hidden_size",
    "vocab_size_per_layer_input": "per_layer_input.vocab_size",
    "num_experts": "moe.num_experts",
    "top_k_experts": "moe.num_experts_per_tok",
    "moe_intermediate_size": "moe.intermediate_size",
}
_DERIVED = {
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "use_bidirectional_attention": None,
}
_OF_LAYER = {
    "per_layer_input.gate": "per_layer_input_gate",
    "per_layer_input.projection": "per_layer_projection",
    "per_layer_input.norm": "post_per_layer_input_norm",
    **{f"moe.{name}": f"experts.{name}" for name in ("gate_up_proj", "down_proj")},
    "moe.router": "router.proj",
    "moe.router_scale": "router.scale",
    "moe.per_expert_scale": "router.per_expert_scale",
    "moe_input_norm": "pre_feedforward_layernorm_2",
    "moe_norm": "post_feedforward_layernorm_2",
    "mlp_norm": "post_feedforward_layernorm_1",
}

GEMMA4 = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    keys={
        "attention_bias": BOTH_BIASES,
        "hidden_activation": "hidden_act",
        "final_logit_softcapping": "final_logit_softcapping",
        "use_double_wide_mlp": "double_wide_mlp",
        **_PARTS,
    },
    defaults={
        **{name: GEMMA3.all_defaults[name] for name in ("hidden_activation", "tie_word_embeddings", "head_dim")},
        "sliding_window": 512,
        "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": _FULL},
        **dict.fromkeys(_PARTS) | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
        **_DERIVED,
    },
    options={"norm_type": "rms_norm_wide", "norm_placement": "both", "qk_norm": "head", "value_norm": True}
    | {"attention_scale": 1.0, "layer_scalar": True, "moe.with_mlp": True},
    derive=derived_fields,
    write=written_keys,
    derived=_DERIVED,
    ignored=IGNORED,
    windows=PATTERN,
    default_types=types_of_layers,
    rope_keys={"rope_local_base_freq": "rope_parameters"},
    names={
        **NAMES,
        "per_layer_inputs.embed_tokens": "model.embed_tokens_per_layer",
        "per_layer_inputs.projection": "model.per_layer_model_projection",
        "per_layer_inputs.norm": "model.per_layer_projection_norm",
        **_OF_LAYER,
    },
    experts_out_in=True,
    whole=Whole(
        architecture="Gemma4ForConditionalGeneration",
        model_type="gemma4",
        defaults={**GEMMA3.whole.defaults, "vocab_size": 262144, "num_hidden_layers": 30} if GEMMA3.whole else {},
    ),
)
