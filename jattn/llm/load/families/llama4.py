"""The text models of Llama 4: chunks and rotation in most layers, experts whose inputs are weighed."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, Key, Raw, Whole, expert_names, no_rope_layers
from jattn.llm.models.config import ModelConfig
from torch_core.base.errors import Unsupported


def _layers(raw: Raw) -> dict[str, Any]:
    count, interval, step = raw["num_hidden_layers"], raw["no_rope_layer_interval"], raw["interleave_moe_layer_step"]
    flags = raw.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
    given = raw.get("moe_layers")
    sparse = range(step - 1, count, step) if given is None else given
    types = ["chunked_attention" if rotates else "full_attention" for rotates in flags]
    if raw.get("layer_types") not in (None, types):
        wanted = "this build has chunks in the layers with rotary embedding"
        raise Unsupported("layer_types", value=raw["layer_types"], wanted=wanted)
    return {
        "nope_layers": tuple(layer for layer, rotates in enumerate(flags) if not rotates),
        "moe.dense_layers": tuple(layer for layer in range(count) if layer not in sparse),
        "temperature.beta": raw["attn_scale"] if raw["attn_temperature_tuning"] else 0.0,
    }


def _written(config: ModelConfig) -> dict[str, Any]:
    sparse = [layer for layer in range(config.num_hidden_layers) if config.is_sparse(layer)]
    return {"moe_layers": sparse, **no_rope_layers(config)}


LLAMA4 = Family(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    keys={
        "attention_bias": BOTH_BIASES,
        "intermediate_size": "moe.intermediate_size",
        "intermediate_size_mlp": "intermediate_size",
        "num_local_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.num_experts_per_tok",
        "attention_chunk_size": "attention_chunk_size",
        "use_qk_norm": Key("qk_norm", lambda used: "unweighted" if used else None, bool),
        "attn_scale": Key("temperature.beta"),
        "floor_scale": Key("temperature.interval"),
        "attn_temperature_tuning": Key("temperature.beta", write=bool),
    },
    defaults={
        "attention_bias": False,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
        "use_qk_norm": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "attn_temperature_tuning": True,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "no_rope_layer_interval": 4,
        "interleave_moe_layer_step": 1,
    },
    options={
        "qk_norm_after_rotation": True,
        "moe.scoring_func": "sigmoid",
        "moe.norm_topk_prob": False,
        "moe.apply_router_weight_on_input": True,
        "moe.n_shared_experts": 1,
        "temperature.offset": 1,
        "temperature.without_rope": True,
    },
    derive=_layers,
    write=_written,
    derived={"moe_layers": None, "interleave_moe_layer_step": 1},
    layer_types={"chunked_attention": "attention"},
    names={
        "mlp.gate_up_proj": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "mlp.down_proj": "feed_forward.down_proj",
        "moe.router": "feed_forward.router",
        "moe.gate_up_proj": "feed_forward.experts.gate_up_proj",
        "moe.down_proj": "feed_forward.experts.down_proj",
    }
    | expert_names("moe.shared_expert", "feed_forward.shared_expert"),
    rotates_neighbours=True,
    whole=Whole(architecture="Llama4ForConditionalGeneration", model_type="llama4"),
)
