"""Which tensors a model folder must hold, with which shapes, and where in the Flax model each one goes."""

from __future__ import annotations

from dataclasses import dataclass

from jattn.models.config import ModelConfig

__all__ = ["ParameterPlan", "TensorPlan", "plan_parameters"]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of the file: its name and shape there."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """One parameter of the Flax model and the tensors it is made of.

    Attributes:
        path: of the parameter in the nnx state.
        pieces: joined in this order along the parameter's last axis.
        transposed: the file holds each piece as [out, in], the model as [in, out].
    """

    path: tuple[str | int, ...]
    pieces: tuple[TensorPlan, ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter in the model."""
        if len(self.pieces) == 1 and not self.transposed:
            return self.pieces[0].shape
        columns = sum(piece.shape[0] for piece in self.pieces)
        return (self.pieces[0].shape[1], columns) if self.transposed else (columns,)


def plan_parameters(config: ModelConfig) -> tuple[ParameterPlan, ...]:
    """Returns the plan of every parameter, from the config alone.

    Example:
        >>> config = ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        ...                      num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        >>> plan = {parameter.path: parameter for parameter in plan_parameters(config)}
        >>> fused = plan["layers", 0, "self_attn", "qkv_proj", "kernel"]
        >>> fused.shape, [piece.name.rsplit(".", 2)[1] for piece in fused.pieces]
        ((64, 128), ['q_proj', 'k_proj', 'v_proj'])
    """
    hidden = config.hidden_size
    query, key_value, inner = config.query_size, config.key_value_size, config.intermediate_size
    plans = [
        ParameterPlan(
            ("embed_tokens", "embedding"), (TensorPlan("model.embed_tokens.weight", (config.vocab_size, hidden)),)
        ),
        ParameterPlan(("norm", "weight"), (TensorPlan("model.norm.weight", (hidden,)),)),
    ]
    if not config.tie_word_embeddings:
        plans += _linear(("lm_head",), "", {"lm_head": config.vocab_size}, hidden, use_bias=False)
    for index in range(config.num_hidden_layers):
        path, prefix = ("layers", index), f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plans.append(ParameterPlan((*path, norm, "weight"), (TensorPlan(f"{prefix}{norm}.weight", (hidden,)),)))
        attention, mlp = (*path, "self_attn"), (*path, "mlp")
        qkv = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
        gate_up = {"gate_proj": inner, "up_proj": inner}
        plans += _linear((*attention, "qkv_proj"), f"{prefix}self_attn.", qkv, hidden, config.attention_bias)
        plans += _linear(
            (*attention, "o_proj"), f"{prefix}self_attn.", {"o_proj": hidden}, query, config.attention_output_bias
        )
        plans += _linear((*mlp, "gate_up_proj"), f"{prefix}mlp.", gate_up, hidden, config.mlp_bias)
        plans += _linear((*mlp, "down_proj"), f"{prefix}mlp.", {"down_proj": hidden}, inner, config.mlp_bias)
    return tuple(plans)


def _linear(
    path: tuple[str | int, ...], prefix: str, outputs: dict[str, int], inputs: int, use_bias: bool
) -> list[ParameterPlan]:
    weights = tuple(TensorPlan(f"{prefix}{name}.weight", (rows, inputs)) for name, rows in outputs.items())
    plans = [ParameterPlan((*path, "kernel"), weights, transposed=True)]
    if use_bias:
        biases = tuple(TensorPlan(f"{prefix}{name}.bias", (rows,)) for name, rows in outputs.items())
        plans.append(ParameterPlan((*path, "bias"), biases))
    return plans
