"""GPT-Neo: scores that are not scaled, and a window in every second layer."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import Family, Key, Raw, attention_names
from jattn.llm.load.families.gpt2 import GPT2
from jattn.llm.models.config import ModelConfig
from torch_core.base.errors import InvalidInput


def _kinds(raw: Raw) -> list[Any]:
    return [kind for kinds, count in raw["attention_types"] for _ in range(count) for kind in kinds]


def _checked(raw: Raw) -> dict[str, Any]:
    """Refuses other kinds of layers than two, and another number of them."""
    given, count = raw["attention_types"], raw["num_layers"]
    try:
        # Each run is counted before it is written out.
        total = sum(len(kinds) * max(number, 0) for kinds, number in given)
        is_known = total == count and {*map(str, _kinds(raw))} <= {"global", "local"}
    except (TypeError, ValueError):
        is_known = False
    if not is_known:
        wanted = f"it must have 'global' or 'local' for each of the {count} layers, as [[['global', 'local'], 2]]"
        raise InvalidInput("attention_types", value=given, wanted=wanted)
    return {}


def _types(config: ModelConfig) -> Raw:
    windows = [config.window_of(layer) for layer in range(config.num_hidden_layers)]
    types = [[["global" if window is None else "local"], 1] for window in windows]
    own = {"attention_types": types, "window_size": next(filter(None, windows), None)}
    return {**own, "layer_types": None, "sliding_window": None}


GPT_NEO = Family(
    architecture="GPTNeoForCausalLM",
    model_type="gpt_neo",
    keys={
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "activation_function": Key("hidden_act", default="gelu_new"),
        "layer_norm_epsilon": Key("rms_norm_eps", default=1e-5),
    },
    defaults={
        "intermediate_size": lambda raw: 4 * raw["hidden_size"],
        "tie_word_embeddings": True,
        "sliding_window": 256,
        "attention_types": lambda raw: [[["global", "local"], 12]],
    },
    options={**GPT2.options, "attention_bias": False, "attention_scale": 1.0},
    derive=_checked,
    derived={"attention_types": None},
    write=_types,
    absent=("head_dim", "num_key_value_heads"),
    aliases={"window_size": "sliding_window"},
    # It follows from attention_types.
    ignored=("attention_layers", "embed_dropout", "resid_dropout"),
    windows=lambda layer, raw: _kinds(raw)[layer] == "local",
    names={**GPT2.names, **attention_names("self_attn", "attn.attention", ("q_proj", "k_proj", "v_proj", "out_proj"))},
    prefix="transformer.",
    # Masks of old writers.
    unread=r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)",
)
