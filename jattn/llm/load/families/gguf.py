"""How GGUF files spell a family: keys of their metadata and names of their tensors, as llama.cpp has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Tensor names by module of the decoder, as in `Family.names`.
GGUF_NAMES: dict[str, str | tuple[str, ...]] = {
    "embed_tokens": "token_embd",
    "position_embedding": "position_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "layer": "blk.{layer}.",
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": ("attn_q", "attn_k", "attn_v"),
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "attention_output_norm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": ("ffn_gate", "ffn_up"),
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp_output_norm": "post_ffw_norm",
    "moe.router": "ffn_gate_inp",
    "moe.gate_up_proj": ("ffn_gate_exps.{expert}", "ffn_up_exps.{expert}"),
    "moe.down_proj": "ffn_down_exps.{expert}",
    "moe.shared_expert.gate_up_proj": ("ffn_gate_shexp", "ffn_up_shexp"),
    "moe.shared_expert.down_proj": "ffn_down_shexp",
    "moe.shared_expert_gate": "ffn_gate_inp_shexp",
}
#: Keys of the metadata, after the architecture's name, and the fields of `ModelConfig` that they set.
GGUF_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "rms_norm_eps",
    "attention.scale": "attention_scale",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "moe.num_experts",
    "expert_used_count": "moe.num_experts_per_tok",
    "expert_feed_forward_length": "moe.intermediate_size",
    "expert_shared_feed_forward_length": "moe.shared_intermediate_size",
}
#: Those that set a key of config.json.
GGUF_KEYS = {
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """The spelling of one family.

    Attributes:
        architecture: general.architecture, which is the prefix of the model's keys.
        values: keys of config.json that no file has; a function gets the file's values, by their keys in config.json.
        names: tensor names, if they differ from `GGUF_NAMES`.
        rotates_neighbours: the pairs of a rotary embedding are neighbours; llama.cpp reorders the rows of queries and
            keys for it.
        norm_offset: the file's weights of norms are those of the model plus this.
        pre_tokenizer: tokenizer.ggml.pre of files without this key, in a BPE vocabulary; None refuses them.
    """

    architecture: str
    values: Mapping[str, Any | Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    rotates_neighbours: bool = False
    norm_offset: float = 0.0
    pre_tokenizer: str | None = None
