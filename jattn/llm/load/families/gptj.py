"""GPT-J: attention and feed-forward part side by side, and neighbours rotated in a part of each head."""

from __future__ import annotations

from jattn.llm.load.families.family import Family, Raw, attention_names, check_rotary_dim
from jattn.llm.load.families.gpt2 import GPT2


def _share(raw: Raw) -> float:
    head_dim = raw["n_embd"] // raw["n_head"]
    return (raw["rotary_dim"] or head_dim) / head_dim


GPTJ = Family(
    architecture="GPTJForCausalLM",
    model_type="gptj",
    keys=GPT2.keys,
    defaults={**GPT2.all_defaults, "tie_word_embeddings": False, "rotary_dim": 64, "partial_rotary_factor": _share},
    options={
        **{name: value for name, value in GPT2.options.items() if not name.startswith(("attention", "position"))},
        "parallel_block": "shared_norm",
        "lm_head_bias": True,
    },
    derive=lambda raw: check_rotary_dim(raw) or {},
    derived={"rotary_dim": None},
    write=lambda config: {"rotary_dim": config.rotary_dim, "partial_rotary_factor": None},
    absent=GPT2.absent,
    ignored=("rotary", "scale_attn_weights"),
    rope_keys={"partial_rotary_factor": "partial_rotary_factor"},
    names={
        **{name: place for name, place in GPT2.names.items() if "." not in name},
        "mlp.up_proj": "mlp.fc_in",
        "mlp.down_proj": "mlp.fc_out",
        **attention_names("self_attn", "attn", ("q_proj", "k_proj", "v_proj", "out_proj")),
    },
    prefix="transformer.",
    rotates_neighbours=True,
    # Masks of old writers.
    unread=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
)
