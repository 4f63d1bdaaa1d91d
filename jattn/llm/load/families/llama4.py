"""The text models of Llama 4: chunks and rotation in most layers, experts whose inputs are weighed."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, Key, Raw, Whole, expert_names, no_rope_layers
from jattn.llm.load.families.mixtral import KEYS
from torch_core.base.errors import Unsupported


def _layers(raw: Raw) -> dict[str, Any]:
    count, interval, step = raw["num_hidden_layers"], raw["no_rope_layer_interval"], raw["interleave_moe_layer_step"]
    flags = raw.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
    sparse = range(step - 1, count, step) if raw.get("moe_layers") is None else raw["moe_layers"]
    types = ["chunked_attention" if rotates else "full_attention" for rotates in flags]
    if raw.get("layer_types") not in (None, types):
        raise Unsupported("layer_types", value=raw["layer_types"], wanted="layers that rotate have chunks here")
    return {
        "nope_layers": tuple(layer for layer, rotates in enumerate(flags) if not rotates),
        "moe.dense_layers": tuple(layer for layer in range(count) if layer not in sparse),
        "temperature.beta": raw["attn_scale"] if raw["attn_temperature_tuning"] else 0.0,
    }


_ON = ("qk_norm_after_rotation", "moe.apply_router_weight_on_input", "temperature.without_rope")

LLAMA4 = Family(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    keys={
        "attention_bias": BOTH_BIASES,
        "intermediate_size": Key("moe.intermediate_size", default=8192),
        "intermediate_size_mlp": Key("intermediate_size", default=16384),
        **KEYS,
        "attention_chunk_size": Key("attention_chunk_size", default=8192),
        "use_qk_norm": Key("qk_norm", lambda used: "unweighted" if used else None, bool),
        "attn_scale": Key("temperature.beta", default=0.1),
        "floor_scale": Key("temperature.interval", default=8192),
        "attn_temperature_tuning": Key("temperature.beta", write=bool),
    },
    defaults={
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        **dict.fromkeys(("use_qk_norm", "attn_temperature_tuning"), True),
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "no_rope_layer_interval": 4,
        "interleave_moe_layer_step": 1,
    },
    options={
        "moe.scoring_func": "sigmoid",
        "moe.norm_topk_prob": False,
        **dict.fromkeys(("moe.n_shared_experts", "temperature.offset"), 1),
        **dict.fromkeys(_ON, True),
    },
    derive=_layers,
    write=lambda config: {
        "moe_layers": [layer for layer in range(config.num_hidden_layers) if config.is_sparse(layer)],
        **no_rope_layers(config),
    },
    derived={"moe_layers": None, "interleave_moe_layer_step": 1},
    layer_types={"chunked_attention": "attention"},
    names={
        "mlp.gate_up_proj": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "mlp.down_proj": "feed_forward.down_proj",
        "moe.router": "feed_forward.router",
        **{f"moe.{name}": f"feed_forward.experts.{name}" for name in ("gate_up_proj", "down_proj")},
    }
    | expert_names("moe.shared_expert", "feed_forward.shared_expert"),
    rotates_neighbours=True,
    whole=Whole(architecture="Llama4ForConditionalGeneration", model_type="llama4"),
)
