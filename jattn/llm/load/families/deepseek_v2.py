"""DeepSeek-V2 (arXiv:2405.04434; Lite too), and the common parts of V2 and V3: latents, experts in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, Key, Raw, expert_names
from torch_core.base.checks import check_int
from torch_core.base.errors import Unsupported


def first_layers(name: str) -> Callable[[Any], tuple[int, ...]]:
    """Returns the conversion of a number of layers, by the name of its key, to the indices of the first ones."""

    def layers(count: Any) -> tuple[int, ...]:
        check_int(f"config.json: {name}", count, 0, 512)
        return tuple(range(count))

    return layers


def without_experts(raw: Raw, default: int, most: int = 512) -> tuple[int, ...]:
    """Returns the layers before `first_k_dense_replace`, `default` of them if the file has null or nothing."""
    given = raw.get("first_k_dense_replace")
    check_int("first_k_dense_replace", count := default if given is None else given, 0, most)
    return tuple(range(count))


_GROUPS = {
    name: Key(f"moe.{name}", lambda groups: 1 if groups is None else groups) for name in ("n_group", "topk_group")
}
LATENT_KEYS = {
    "kv_lora_rank": Key("latent.kv_lora_rank", default=512),
    "q_lora_rank": Key("latent.q_lora_rank", default=1536),
    "qk_nope_head_dim": Key("latent.qk_nope_head_dim", default=128),
    "qk_rope_head_dim": Key("latent.qk_rope_head_dim", default=64),
    "v_head_dim": Key("latent.v_head_dim", default=128),
}
KEYS = {
    "attention_bias": BOTH_BIASES,
    **_GROUPS,
    "n_routed_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.num_experts_per_tok",
    "moe_intermediate_size": "moe.intermediate_size",
    "n_shared_experts": "moe.n_shared_experts",
    "routed_scaling_factor": "moe.routed_scaling_factor",
    "first_k_dense_replace": Key("moe.dense_layers", first_layers("first_k_dense_replace"), len),
} | LATENT_KEYS
DEFAULTS = {"head_dim": lambda raw: raw["qk_rope_head_dim"]}
NAMES = {"moe.router": "mlp.gate", "moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias"}
NAMES |= expert_names("moe", "mlp.experts.{expert}") | expert_names("moe.shared_expert", "mlp.shared_experts")


def _groups(raw: Raw) -> dict[str, Any]:
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
