"""MiniMax-Text-01 (arXiv:2501.08313) and M1: lightning attention in most layers, norms on the residual stream."""

from __future__ import annotations

from jattn.llm.load.families.family import Family
from jattn.llm.load.families.minimax_files import DERIVED, FACTORS, KINDS, OLD_KINDS, layer_types, sizes, slope_rates
from jattn.llm.load.families.mixtral import KEYS, MIXTRAL

MINIMAX = Family(
    architecture="MiniMaxForCausalLM",
    model_type="minimax",
    keys=KEYS | {f"{kind}_{factor}_factor": field for kind in KINDS for factor, field in FACTORS.items()},
    defaults={
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "partial_rotary_factor": lambda raw: raw["rotary_dim"] / raw["head_dim"] if raw.get("rotary_dim") else 1.0,
        **{f"{kind}_{factor}_factor": 1 for kind in KINDS for factor in FACTORS},
    },
    options={"norm_placement": "stream"},
    derive=sizes,
    derived=DERIVED,
    aliases={
        "num_experts": "num_local_experts",
        **{f"layernorm_{old}_{factor}": f"{kind}_{factor}_factor" for kind, old in OLD_KINDS for factor in FACTORS},
    },
    # Of a computation in blocks, and of a shared expert, which no file has.
    ignored=("block_size", "shared_moe_mode"),
    inert={"postnorm": True},
    also=("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
    also_types=("minimax_text_01", "minimax_m1"),
    layer_types={"linear_attention": "lightning_attention"},
    default_types=layer_types,
    rope_keys={"partial_rotary_factor": "partial_rotary_factor"},
    names={
        **MIXTRAL.names,
        **{f"lightning.{name}": f"self_attn.{name}" for name in ("qkv_proj", "output_gate", "out_proj", "norm")},
        "lightning.slope_rate": "self_attn.slope_rate",
    },
    also_spelled=MIXTRAL.also_spelled,
    shapes={"lightning.slope_rate": (-1, 1, 1)},
    # Powers of the rates, of that computation.
    unread=r"model\.layers\.\d+\.self_attn\.(query|key|diagonal)_decay",
    computed={"lightning.slope_rate": slope_rates},
    brings_code=True,
)
