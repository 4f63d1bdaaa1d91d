"""DeepSeek-V2 (arXiv:2405.04434; Lite too): softmax scores, experts in groups or without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jattn.llm.load.families.deepseek import DEFAULTS, KEYS, NAMES
from jattn.llm.load.families.family import Family, Key
from torch_core.base.errors import Unsupported


def _groups(raw: Mapping[str, Any]) -> dict[str, Any]:
    method = raw["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise Unsupported("topk_method", value=method, wanted="this build has greedy and group_limited_greedy")
    return {"moe.n_group": 1, "moe.topk_group": 1} if method == "greedy" else {}


DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    # Where topk_method is "greedy", n_group means nothing.
    keys={"topk_method": Key("moe.n_group", lambda _: 1, lambda n: "greedy" if n == 1 else "group_limited_greedy")}
    | KEYS,
    defaults=DEFAULTS
    | {"topk_method": "greedy", "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
    options={"moe.norm_topk_prob": False},
    derive=_groups,
    inert={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
    names=NAMES,
    brings_code=True,
)
