"""OPT (arXiv:2205.01068): learned positions from the third row of their table on, and ReLU."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BIASES, Family, Key, Raw, attention_names
from torch_core.base.errors import Unsupported


def _norms(raw: Raw) -> dict[str, Any]:
    """Returns the places of the norms; refuses an embedding of another width."""
    width = raw.get("word_embed_proj_dim")
    if width not in (None, raw["hidden_size"]):
        wanted = f"this build has the hidden_size ({raw['hidden_size']})"
        raise Unsupported("word_embed_proj_dim", value=width, wanted=wanted)
    before = raw["do_layer_norm_before"]
    # Files of models that were tuned with the first code have no last norm.
    return {"final_norm": before and not raw.get("_remove_final_layer_norm")}


OPT = Family(
    architecture="OPTForCausalLM",
    model_type="opt",
    keys={
        "ffn_dim": "intermediate_size",
        "activation_function": Key("hidden_act", default="relu"),
        "enable_bias": Key(tuple(BIASES), default=True),
        "layer_norm_elementwise_affine": Key("norm_bias", default=True),
        "do_layer_norm_before": Key(
            "norm_placement", lambda before: "before" if before else "residual", lambda place: place == "before"
        ),
        "_remove_final_layer_norm": Key("final_norm", lambda removed: not removed, lambda kept: not kept),
    },
    defaults={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "tie_word_embeddings": True},
    options={"norm_type": "layer_norm", "gated_mlp": False, "rms_norm_eps": 1e-5}
    | {"position_embedding": "learned", "position_offset": 2},
    derive=_norms,
    derived={"word_embed_proj_dim": None},
    absent=("head_dim", "num_key_value_heads"),
    inert={"learned_embeddings": True, "scale_embeddings": False},
    ignored=("layerdrop", "output_projection"),
    # Galactica's (arXiv:2211.09085) have neither weights nor biases.
    norms_without_weights=lambda config: not config.norm_bias,
    names={
        "embed_tokens": "model.decoder.embed_tokens",
        "position_embedding": "model.decoder.embed_positions",
        "norm": "model.decoder.final_layer_norm",
        "layer": "model.decoder.layers.{layer}.",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    }
    | attention_names("self_attn", "self_attn", ("q_proj", "k_proj", "v_proj", "out_proj"))
    | {"input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm"}
    # Of the model with norms after each sum.
    | {"attention_output_norm": "self_attn_layer_norm", "mlp_output_norm": "final_layer_norm"},
)
