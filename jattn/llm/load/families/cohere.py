"""Command R: attention and feed-forward side by side after one layer norm, neighbours rotated, scaled logits."""

from __future__ import annotations

from jattn.llm.load.families.family import BOTH_BIASES, Family, Key

COHERE = Family(
    architecture="CohereForCausalLM",
    model_type="cohere",
    keys={
        "attention_bias": BOTH_BIASES,
        "layer_norm_eps": "rms_norm_eps",
        "logit_scale": "logits_scale",
        "use_qk_norm": Key("qk_norm", lambda used: "per_head" if used else None, lambda kind: kind is not None),
    },
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 500000.0},
    options={"norm_type": "layer_norm", "parallel_block": "shared_norm"},
    rotates_neighbours=True,
)
