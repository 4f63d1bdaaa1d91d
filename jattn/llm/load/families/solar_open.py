"""Solar Open: GLM-4.5 with experts in every layer, and whole heads rotated."""

from __future__ import annotations

import dataclasses

from jattn.llm.load.families.glm_moe import GLM4_MOE

_SOLAR_KEYS = {name: key for name, key in GLM4_MOE.keys.items() if name not in ("first_k_dense_replace", "use_qk_norm")}
SOLAR_OPEN = dataclasses.replace(
    GLM4_MOE,
    architecture="SolarOpenForCausalLM",
    model_type="solar_open",
    keys={**_SOLAR_KEYS, "attention_bias": "attention_bias"},
    defaults={
        **{name: value for name, value in GLM4_MOE.all_defaults.items() if name in _SOLAR_KEYS},
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "moe_intermediate_size": 1280,
        "rope_theta": 1e6,
        "intermediate_size": lambda raw: raw["moe_intermediate_size"],
    },
    inert={"first_k_dense_replace": 0, "use_qk_norm": False},
    rope_keys={},
)
