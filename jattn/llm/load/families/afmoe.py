"""AFMoE (Trinity): gated attention, rotary embedding in the layers with a window alone, norms around each branch."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.deepseek_v2 import first_layers
from jattn.llm.load.families.family import Family, Key, Raw, expert_names
from jattn.llm.load.families.window_rope import slides, without_rope_in_full_layers


def _scaled(raw: Raw) -> dict[str, Any]:
    scale = raw["hidden_size"] ** 0.5 if raw["mup_enabled"] else 1.0
    return {"embedding_multiplier": scale, **without_rope_in_full_layers(raw)}


AFMOE = Family(
    architecture="AfmoeForCausalLM",
    model_type="afmoe",
    keys={
        "num_experts": Key("moe.num_experts", default=64),
        "num_experts_per_tok": Key("moe.num_experts_per_tok", default=6),
        "num_shared_experts": Key("moe.n_shared_experts", default=2),
        "moe_intermediate_size": Key("moe.intermediate_size", default=1408),
        "route_scale": Key("moe.routed_scaling_factor", default=1.0),
        "num_dense_layers": Key("moe.dense_layers", first_layers("num_dense_layers"), len, default=1),
        "mup_enabled": Key("embedding_multiplier", write=lambda scale: scale != 1, default=False),
    },
    defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 1024, "sliding_window_pattern": 4},
    options={
        "norm_type": "rms_norm_wide",
        "norm_placement": "both",
        "qk_norm": "head",
        "attn_output_gate": True,
        "moe.scoring_func": "sigmoid",
        "moe.score_correction_bias": True,
    },
    derive=_scaled,
    aliases={"global_attn_every_n_layers": "sliding_window_pattern"},
    inert={
        "score_func": "sigmoid",
        "route_norm": True,
        **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), 1),
    },
    # Of training.
    ignored=("load_balance_coeff", "use_grouped_mm"),
    windows=slides,
    names={
        "self_attn.qkv_proj": tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "gate")),
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "mlp_output_norm": "post_mlp_layernorm",
        "moe.router": "mlp.router.gate",
        "moe.e_score_correction_bias": "mlp.expert_bias",
    }
    | expert_names("moe", "mlp.experts.{expert}")
    | expert_names("moe.shared_expert", "mlp.shared_experts"),
    brings_code=True,
)
