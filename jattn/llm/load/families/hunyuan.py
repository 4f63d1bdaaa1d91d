"""HunYuan, dense and with experts: norms on queries and keys after their rotation, a shared expert."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, Key, expert_names


def _one(value: Any) -> Any:
    """Returns the number of a list with the same one for each layer."""
    return value[0] if isinstance(value, list) and value and value == value[:1] * len(value) else value


_NORMS = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
#: Keys of the models that these files once were for, and of training.
_UNUSED = """
add_classification_head attention_head_dim cla_share_factor class_num dense_list eod_token_id group_limited_greedy
im_end_id im_newline_id im_start_id image_token_id mask_init_id moe_drop_tokens moe_layer_num_skipped
moe_random_routing_dropped_token n_group norm_topk_prob num_media_embeds num_shared_expert org_vocab_size pad_id
pool_type position_embedding_xdrope q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
routed_scaling_factor sep_id text_end_id text_start_id topk_group use_cla use_mixed_mlp_moe video_end_id
video_start_id xdrope_section moe_intermediate_size moe_replace_prefix anyres_pooling_size anyres_vit_max_image_size
anyres_vit_two_views
"""

HUNYUAN_DENSE = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    keys={"attention_bias": BOTH_BIASES},
    defaults={"rms_norm_eps": 1e-5},
    options={"qk_norm": "head", "qk_norm_after_rotation": True},
    ignored=tuple(_UNUSED.split()),
    inert={"use_qk_norm": True},
    rope_keys={"alpha": "alpha"},
    names=_NORMS,
)

HUNYUAN_MOE = Family(
    architecture="HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    keys={
        "attention_bias": BOTH_BIASES,
        "num_experts": Key("moe.num_experts", _one),
        "moe_topk": Key("moe.num_experts_per_tok", _one),
    },
    defaults={"rms_norm_eps": 1e-5},
    options=HUNYUAN_DENSE.options,
    derive=lambda raw: {"moe.intermediate_size": raw["intermediate_size"], "moe.n_shared_experts": 1},
    aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
    ignored=HUNYUAN_DENSE.ignored,
    inert={"use_qk_norm": True},
    rope_keys={"alpha": "alpha"},
    names={**_NORMS, "moe.router": "mlp.gate.wg"}
    | expert_names("moe", "mlp.experts.{expert}")
    | expert_names("moe.shared_expert", "mlp.shared_mlp"),
    brings_code=True,
)
