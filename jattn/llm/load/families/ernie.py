"""ERNIE 4.5: neighbours rotated, biases everywhere or nowhere; with experts, softmax scores with a correction."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BIASES, Family, Key, Raw, expert_names
from jattn.llm.models.config_fields import SIZE_LIMITS
from torch_core.base.checks import check_int

ERNIE4_5 = Family(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    keys={"use_bias": Key(tuple(BIASES))},
    defaults={
        "use_bias": False,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    rotates_neighbours=True,
)


def _dense_layers(raw: Raw) -> dict[str, Any]:
    names = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    count, (start, end, interval) = raw["num_hidden_layers"], (raw[name] for name in names)
    for name, low in zip(names, (0, -1, 1), strict=True):
        check_int(name, raw[name], low, SIZE_LIMITS["num_hidden_layers"])
    end = count - 1 if end == -1 else end
    sparse = {layer for layer in range(start, end + 1) if (layer + 1) % interval == 0}
    bias = {"lm_head_bias": bool(raw["use_bias"]) and not raw["tie_word_embeddings"]}
    return bias | {"moe.dense_layers": tuple(layer for layer in range(count) if layer not in sparse)}


ERNIE4_5_MOE = Family(
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    keys={
        "use_bias": Key(tuple(BIASES), default=False),
        "moe_k": Key("moe.num_experts_per_tok", default=6),
        "moe_num_experts": Key("moe.num_experts", default=64),
        "moe_intermediate_size": Key("moe.intermediate_size", default=1536),
        "moe_num_shared_experts": Key("moe.n_shared_experts", default=2),
        # The first layers are dense.
        "moe_layer_start_index": Key("moe.dense_layers", write=len, default=1),
    },
    defaults={
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    options={"moe.score_correction_bias": True},
    derive=_dense_layers,
    derived={"moe_layer_end_index": -1, "moe_layer_interval": 1},
    absent=("head_dim",),
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ignored=("moe_norm_min", "moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers"),
    names={"moe.router": "mlp.gate", "moe.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias"}
    | expert_names("moe", "mlp.experts.{expert}")
    | expert_names("moe.shared_expert", "mlp.shared_experts"),
    shapes={"moe.e_score_correction_bias": (1, -1)},
    rotates_neighbours=True,
    unread=r"model\.mtp.+",
)
