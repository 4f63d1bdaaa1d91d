"""Which parameters a decoder has, with which shapes: from the config alone, without building anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from jattn.llm.models.config import ModelConfig
    from jattn.llm.models.parts import LatentConfig

__all__ = ["ParameterPath", "parameter_shapes"]

#: Of a parameter in the nnx state of a `Decoder`.
ParameterPath: TypeAlias = tuple[str | int, ...]
_Shapes: TypeAlias = dict[ParameterPath, tuple[int, ...]]


def parameter_shapes(config: ModelConfig) -> _Shapes:
    """Returns the shape of every parameter by its path; kernels are [in, out], those of experts [experts, in, out]."""
    hidden = config.hidden_size
    shapes: _Shapes = {("embed_tokens", "embedding"): (config.vocab_size, hidden)} | _stack(config)
    if config.encoder is not None:
        shapes |= {("encoder", *path): shape for path, shape in _stack(config.encoder).items()}
    if not config.tie_word_embeddings and not config.is_encoder:
        shapes["lm_head", "kernel"] = (hidden, config.vocab_size)
    if config.logits_bias:
        shapes["final_logits_bias",] = (1, config.vocab_size)
    return shapes


def _stack(config: ModelConfig) -> _Shapes:
    """Everything between the embedding of tokens and the output projection."""
    hidden = config.hidden_size
    shapes: _Shapes = {}
    if config.position_embedding == "learned":
        rows = config.position_offset + config.max_position_embeddings
        shapes["position_embedding", "embedding"] = (rows, hidden)
    if config.position_embedding == "relative":
        sizes = (config.relative_attention_num_buckets, config.num_attention_heads)
        shapes["relative_attention_bias", "embedding"] = sizes
    if config.token_types:
        shapes["token_type_embedding", "embedding"] = (config.token_types, hidden)
    if config.embedding_norm:
        shapes |= _norm(config, "embedding_norm", hidden)
    for index in range(config.num_hidden_layers):
        shapes |= {("layers", index, *path): shape for path, shape in _layer(config, index).items()}
    return shapes | _norm(config, "norm", hidden) if config.final_norm else shapes


def _layer(config: ModelConfig, index: int) -> _Shapes:
    hidden, before, after = config.hidden_size, *config.norms_before_and_after
    names = ("input_layernorm",) * before
    names += ("post_attention_layernorm",) * (before and config.parallel_block != "shared_norm")
    names += ("attention_output_norm", "mlp_output_norm") * after
    names += ("cross_attention_norm",) * (config.encoder is not None)
    shapes: _Shapes = {}
    for name in names:
        shapes |= _norm(config, name, hidden)
    attention = _attention(config, index) if config.latent is None else _latent_attention(config, config.latent)
    shapes |= {("self_attn", *path): shape for path, shape in attention.items()}
    if config.encoder is not None:
        shapes |= {("cross_attn", *path): shape for path, shape in _cross_attention(config).items()}
    if not config.is_sparse(index):
        feed_forward = _feed_forward(config, config.intermediate_size)
        return shapes | {("mlp", *path): shape for path, shape in feed_forward.items()}
    return shapes | {("moe", *path): shape for path, shape in _experts(config).items()}


def _attention(config: ModelConfig, index: int) -> _Shapes:
    hidden, has_own = config.hidden_size, config.kv_sharing_target(index) is None
    attention: _Shapes = _linear(
        "qkv_proj", hidden, config.query_size + 2 * config.key_value_size * has_own, config.attention_bias
    )
    attention |= _linear("o_proj", config.query_size, hidden, config.attention_output_bias)
    for name, heads in (("q_norm", config.num_attention_heads), ("k_norm", config.num_key_value_heads)):
        if config.qk_norm is not None and (has_own or name == "q_norm"):
            sizes = {
                "head": (config.head_dim,),
                "per_head": (heads, config.head_dim),
                "all": (heads * config.head_dim,),
            }
            attention[name, "weight"] = sizes[config.qk_norm]
    if config.attention_sinks:
        attention["sinks",] = (config.num_attention_heads,)
    return attention


def _cross_attention(config: ModelConfig) -> _Shapes:
    hidden, use_bias = config.hidden_size, config.attention_bias
    shapes = _linear("q_proj", hidden, config.query_size, use_bias)
    shapes |= _linear("kv_proj", hidden, 2 * config.key_value_size, use_bias)
    return shapes | _linear("o_proj", config.query_size, hidden, config.attention_output_bias)


def _latent_attention(config: ModelConfig, latent: LatentConfig) -> _Shapes:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, latent.kv_lora_rank
    query, use_bias = heads * latent.qk_head_dim, config.attention_bias
    if latent.q_lora_rank is None:
        shapes = _linear("q_proj", hidden, query, False)
    else:
        shapes = _linear("q_a_proj", hidden, latent.q_lora_rank, use_bias)
        shapes["q_a_layernorm", "scale"] = (latent.q_lora_rank,)
        shapes |= _linear("q_b_proj", latent.q_lora_rank, query, False)
    shapes |= _linear("kv_a_proj_with_mqa", hidden, rank + latent.qk_rope_head_dim, use_bias)
    shapes["kv_a_layernorm", "scale"] = (rank,)
    shapes |= _linear("kv_b_proj", rank, heads * (latent.qk_nope_head_dim + latent.v_head_dim), False)
    shapes |= _linear("o_proj", heads * latent.v_head_dim, hidden, use_bias)
    if latent.q_lora_rank and latent.index_n_heads and latent.index_head_dim:
        heads, size = latent.index_n_heads, latent.index_head_dim
        parts = _linear("wq_b", latent.q_lora_rank, heads * size, False)
        parts |= _linear("wk", hidden, size, False) | _linear("weights_proj", hidden, heads, False)
        parts |= {("k_norm", leaf): (size,) for leaf in ("scale", "bias")}
        shapes |= {("indexer", *path): shape for path, shape in parts.items()}
    return shapes


def _experts(config: ModelConfig) -> _Shapes:
    hidden, moe = config.hidden_size, config.moe
    if moe is None:
        return {}
    shapes = _linear("router", hidden, moe.num_experts, moe.router_bias)
    for name, sizes in (
        ("gate_up_proj", (hidden, 2 * moe.intermediate_size)),
        ("down_proj", (moe.intermediate_size, hidden)),
    ):
        shapes |= {path: (moe.num_experts, *shape) for path, shape in _linear(name, *sizes, moe.expert_bias).items()}
    if moe.score_correction_bias:
        shapes["e_score_correction_bias",] = (moe.num_experts,)
    if moe.shared_width:
        shared = _feed_forward(config, moe.shared_width)
        shapes |= {("shared_expert", *path): shape for path, shape in shared.items()}
    if moe.shared_intermediate_size:
        shapes["shared_expert_gate", "kernel"] = (hidden, 1)
    return shapes


def _feed_forward(config: ModelConfig, inner: int) -> _Shapes:
    first, width = ("gate_up_proj", 2 * inner) if config.gated_mlp else ("up_proj", inner)
    return _linear(first, config.hidden_size, width, config.mlp_bias) | _linear(
        "down_proj", inner, config.hidden_size, config.mlp_bias
    )


def _linear(name: str, inputs: int, outputs: int, use_bias: bool) -> _Shapes:
    shapes: _Shapes = {(name, "kernel"): (inputs, outputs)}
    return shapes | {(name, "bias"): (outputs,)} if use_bias else shapes


def _norm(config: ModelConfig, name: str, features: int) -> _Shapes:
    shapes: _Shapes = {(name, "weight"): (features,)}
    return shapes | {(name, "bias"): (features,)} if config.norm_bias else shapes
