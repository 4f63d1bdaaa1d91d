"""LFM2 with experts: sigmoid scores, some of the first layers without."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.deepseek_v2 import first_layers
from jattn.llm.load.families.family import Key
from jattn.llm.load.families.lfm2 import LFM2

_WITHOUT_SHRINKING = {name: key for name, key in LFM2.keys.items() if name != "block_ff_dim"}
LFM2_MOE = replace(
    LFM2,
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    keys={
        **_WITHOUT_SHRINKING,
        "moe_intermediate_size": Key("moe.intermediate_size", default=1792),
        "norm_topk_prob": Key("moe.norm_topk_prob", default=True),
        "num_dense_layers": Key("moe.dense_layers", first_layers("num_dense_layers"), len, default=2),
        "num_experts": Key("moe.num_experts", default=32),
        "num_experts_per_tok": Key("moe.num_experts_per_tok", default=4),
        "routed_scaling_factor": Key("moe.routed_scaling_factor", default=1.0),
        "use_expert_bias": Key("moe.score_correction_bias", default=True),
    },
    defaults={name: LFM2.all_defaults[name] for name in (*_WITHOUT_SHRINKING, "rope_theta")},
    options={**LFM2.options, "moe.scoring_func": "sigmoid"},
    derive=None,
    derived={"full_attn_idxs": None},
    aliases={"tie_word_embeddings": "tie_embedding", "num_local_experts": "num_experts"},
    names={
        **LFM2.names,
        "moe.router": "feed_forward.gate",
        "moe.e_score_correction_bias": "feed_forward.expert_bias",
        "moe.gate_up_proj": ("feed_forward.experts.{expert}.w1", "feed_forward.experts.{expert}.w3"),
        "moe.down_proj": "feed_forward.experts.{expert}.w2",
    },
)
