"""nanochat and OLMo (arXiv:2402.00838): norms without weights."""

from __future__ import annotations

from jattn.llm.load.families.family import BOTH_BIASES, Family

# Keys are rotated the other way round: as if the second half of each head were its first. Norms come after it.
NANOCHAT = Family(
    architecture="NanoChatForCausalLM",
    model_type="nanochat",
    keys={"attention_bias": BOTH_BIASES, "final_logit_softcapping": "final_logit_softcapping"},
    defaults={"hidden_act": "relu2", "final_logit_softcapping": 15.0},
    options={"gated_mlp": False, "embedding_norm": True, "qk_norm": "unweighted", "qk_norm_after_rotation": True},
    absent=("head_dim",),
    aliases={"logits_soft_cap": "final_logit_softcapping", "logits_softcap": "final_logit_softcapping"},
    names={"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
    order={"self_attn.qkv_proj": "second_half_first"},
    norms_without_weights=lambda config: True,
)

OLMO = Family(
    architecture="OlmoForCausalLM",
    model_type="olmo",
    keys={"attention_bias": BOTH_BIASES, "clip_qkv": "clip_qkv"},
    options={"norm_type": "layer_norm", "rms_norm_eps": 1e-5},
    absent=("head_dim",),
    norms_without_weights=lambda config: True,
)
