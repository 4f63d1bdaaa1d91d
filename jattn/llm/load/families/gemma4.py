"""The text models of Gemma 4: two sizes of heads, values from keys, shared layers, an input of each layer, experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, Raw, Whole, every
from jattn.llm.load.families.gemma import IGNORED, NAMES, scaled_embedding
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.parts import last_of_each_window
from torch_core.base.errors import InvalidInput, Unsupported

_PATTERN = every(6)


def _types(raw: Raw) -> list[str]:
    count = raw["num_hidden_layers"]
    slides = [_PATTERN(layer, raw) and layer < count - 1 for layer in range(count)]
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _full_attention(raw: Raw, types: list[str]) -> dict[str, Any]:
    """Returns the sizes of layers without a window: transformers writes them by layer, published files once."""
    k_eq_v, given = raw["attention_k_eq_v"], raw.get("per_layer_config")
    heads = (k_eq_v and raw.get("num_global_key_value_heads")) or raw["num_key_value_heads"]
    own: Mapping[str, Any] = {"head_dim": raw["global_head_dim"], "num_key_value_heads": heads}
    if given is not None:
        full = {str(layer): given.get(str(layer)) for layer, kind in enumerate(types) if kind == "full_attention"}
        own, *others = full.values()
        if given.keys() != full.keys() or not isinstance(own, dict) or any(other != own for other in others):
            wanted = "this build has one head_dim and num_key_value_heads for all layers with full attention"
            raise Unsupported("per_layer_config", value=given, wanted=wanted)
        own = {"head_dim": raw["head_dim"], "num_key_value_heads": raw["num_key_value_heads"], **own}
        if len(own) > 2:
            raise Unsupported("per_layer_config", value=given, wanted="it has head_dim and num_key_value_heads")
    return {f"full_attention.{name}": value for name, value in own.items()}


def _derive(raw: Raw) -> dict[str, Any]:
    types, count = raw.get("layer_types") or _types(raw), raw["num_hidden_layers"]
    if not isinstance(types, list) or len(types) != count or types[-1] != "full_attention":
        wanted = f"it has an entry for each of the {count} layers, and the last one is 'full_attention'"
        raise InvalidInput("layer_types", value=types, wanted=wanted)
    if raw["use_bidirectional_attention"] not in (None, "vision"):
        wanted = "this build has null, or 'vision', which changes no text"
        raise Unsupported("use_bidirectional_attention", value=raw["use_bidirectional_attention"], wanted=wanted)
    windows = [raw["sliding_window"] if kind == "sliding_attention" else None for kind in types]
    shared = raw["num_kv_shared_layers"]
    found: dict[str, Any] = scaled_embedding(raw) | _full_attention(raw, types)
    found["full_attention.attention_k_eq_v"] = raw["attention_k_eq_v"]
    found["kv_sharing_targets"] = last_of_each_window(windows, shared) if shared else ()
    # A part that is switched off.
    if raw["hidden_size_per_layer_input"]:
        found["per_layer_input.num_layers"] = count
    else:
        found["per_layer_input"] = None
    return found if raw["enable_moe_block"] else {**found, "moe": None}


def _write(config: ModelConfig) -> dict[str, Any]:
    full = config.full_attention
    return {
        "num_kv_shared_layers": sum(target is not None for target in config.kv_sharing_targets),
        "enable_moe_block": config.moe is not None,
        **({} if config.per_layer_input else {"hidden_size_per_layer_input": 0}),
        **({} if full is None else {"global_head_dim": full.head_dim, "attention_k_eq_v": full.attention_k_eq_v}),
        "num_global_key_value_heads": full.num_key_value_heads if full and full.attention_k_eq_v else None,
    }


_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_SIZES = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}

GEMMA4 = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    keys={
        "attention_bias": BOTH_BIASES,
        "hidden_activation": "hidden_act",
        "final_logit_softcapping": "final_logit_softcapping",
        "use_double_wide_mlp": "double_wide_mlp",
        "hidden_size_per_layer_input": "per_layer_input.hidden_size",
        "vocab_size_per_layer_input": "per_layer_input.vocab_size",
        "num_experts": "moe.num_experts",
        "top_k_experts": "moe.num_experts_per_tok",
        "moe_intermediate_size": "moe.intermediate_size",
    },
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "rope_parameters": _ROPE,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "use_bidirectional_attention": None,
        **dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size")),
    },
    options={
        "norm_type": "rms_norm_wide",
        "norm_placement": "both",
        "qk_norm": "head",
        "value_norm": True,
        "attention_scale": 1.0,
        "layer_scalar": True,
        "moe.with_mlp": True,
    },
    derive=_derive,
    write=_write,
    derived={
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "per_layer_config": None,
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "use_bidirectional_attention": None,
    },
    ignored=IGNORED,
    windows=_PATTERN,
    default_types=_types,
    rope_keys={"rope_local_base_freq": "rope_parameters"},
    names={
        **NAMES,
        "per_layer_inputs.embed_tokens": "model.embed_tokens_per_layer",
        "per_layer_inputs.projection": "model.per_layer_model_projection",
        "per_layer_inputs.norm": "model.per_layer_projection_norm",
        "per_layer_input.gate": "per_layer_input_gate",
        "per_layer_input.projection": "per_layer_projection",
        "per_layer_input.norm": "post_per_layer_input_norm",
        "moe.router": "router.proj",
        "moe.router_scale": "router.scale",
        "moe.per_expert_scale": "router.per_expert_scale",
        "moe.gate_up_proj": "experts.gate_up_proj",
        "moe.down_proj": "experts.down_proj",
        "moe_input_norm": "pre_feedforward_layernorm_2",
        "moe_norm": "post_feedforward_layernorm_2",
        "mlp_norm": "post_feedforward_layernorm_1",
    },
    experts_out_in=True,
    whole=Whole(architecture="Gemma4ForConditionalGeneration", model_type="gemma4", defaults=_SIZES),
)
