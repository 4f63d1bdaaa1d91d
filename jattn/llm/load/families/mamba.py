"""The keys of layers of Mamba-2 that Bamba, Granite 4 and Falcon-H1 have in common."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import Key, Raw
from jattn.llm.models.config import ModelConfig

MAMBA_KEYS: dict[str, str | Key] = {
    "mamba_n_heads": Key("mamba.num_heads", default=128),
    "mamba_d_head": Key("mamba.head_dim", default="auto"),
    "mamba_d_state": Key("mamba.state_size", default=256),
    "mamba_n_groups": Key("mamba.num_groups", default=1),
    "mamba_d_conv": Key("mamba.conv_size", default=4),
    "mamba_conv_bias": Key("mamba.conv_bias", default=True),
    "time_step_limit": Key("mamba.dt_limit", tuple, list, default=[0.0, float("inf")]),
}
PROJECTION_BIASES = Key(("mamba.use_bias", "mamba.out_bias"), default=False)
#: The width of all heads, in widths of the model.
EXPANSION = {"mamba_expand": 2}
MAMBA_TYPES = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention"}
#: Keys of training, of kernels and of generation.
MAMBA_IGNORED = ("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb", "init_method")
#: The names of the layers of Bamba and Falcon-H1.
BAMBA_NAMES: dict[str, str | tuple[str, ...]] = {
    "norm": "model.final_layernorm",
    "post_attention_layernorm": "pre_ff_layernorm",
    "mlp.gate_up_proj": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp.down_proj": "feed_forward.down_proj",
}


def head_dim(raw: Raw, width: int | None = None) -> dict[str, Any]:
    """Returns the elements of a head, where the file leaves them to the `width` of all heads."""
    if raw["mamba_d_head"] != "auto":
        return {}
    width = int(raw["mamba_expand"] * raw["hidden_size"]) if width is None else width
    return {"mamba.head_dim": width // raw["mamba_n_heads"]}


def expansion(config: ModelConfig) -> dict[str, Any]:
    """Returns the key of the width of all heads, in widths of the model."""
    sizes = config.mamba
    if sizes is None:
        return {}
    width = sizes.num_heads * sizes.head_dim
    return {"mamba_expand": width / config.hidden_size if width % config.hidden_size else width // config.hidden_size}
