"""MiniMax-Text-01 (arXiv:2501.08313): lightning attention in most layers, experts, norms on the residual stream."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import Family, Raw
from jattn.llm.load.families.mixtral import KEYS, MIXTRAL
from torch_core.base.errors import Unsupported

_KINDS = ("full_attn", "linear_attn", "mlp")
_FACTORS = {"alpha": "stream_multiplier", "beta": "residual_multiplier"}


def _sizes(raw: Raw) -> dict[str, Any]:
    for factor in _FACTORS:
        values = [raw[f"{kind}_{factor}_factor"] for kind in _KINDS]
        if len(set(values)) > 1:
            name = f"mlp_{factor}_factor"
            raise Unsupported(name, value=raw[name], wanted=f"this build has one for all branches; others are {values}")
    heads = raw["num_attention_heads"]
    given = raw.get("head_dim")
    return {
        "moe.intermediate_size": raw["intermediate_size"],
        "lightning.num_heads": heads,
        "lightning.head_dim": raw["hidden_size"] // heads if given is None else given,
    }


MINIMAX = Family(
    architecture="MiniMaxForCausalLM",
    model_type="minimax",
    keys=KEYS | {f"{kind}_{factor}_factor": field for kind in _KINDS for factor, field in _FACTORS.items()},
    defaults={
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        **{f"{kind}_{factor}_factor": 1 for kind in _KINDS for factor in _FACTORS},
    },
    options={"norm_placement": "stream"},
    derive=_sizes,
    aliases={"num_experts": "num_local_experts"},
    # Of a computation in blocks.
    ignored=("block_size",),
    layer_types={"linear_attention": "lightning_attention"},
    default_types=lambda raw: [
        "linear_attention" if layer % 2 else "full_attention" for layer in range(raw["num_hidden_layers"])
    ],
    names={
        **MIXTRAL.names,
        **{f"lightning.{name}": f"self_attn.{name}" for name in ("qkv_proj", "output_gate", "out_proj", "norm")},
        "lightning.slope_rate": "self_attn.slope_rate",
    },
    also_spelled=MIXTRAL.also_spelled,
    shapes={"lightning.slope_rate": (-1, 1, 1)},
    # Powers of the rates, of that computation.
    unread=r"model\.layers\.\d+\.self_attn\.(query|key|diagonal)_decay",
)
