"""ModelConfig: the shape and the options of one Llama-family decoder, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_core.checks import check_int, shown
from torch_core.errors import InvalidInput, Unsupported
from torch_core.specs import QUERY_DTYPES

__all__ = ["ModelConfig", "RopeScaling"]

_ROPE_TYPES = ("linear", "llama3")
#: Upper limits of every size: far above any published model, far below what would exhaust memory while planning.
_SIZE_LIMITS = {
    "vocab_size": 1 << 20,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_hidden_layers": 512,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 256,
    "max_position_embeddings": 1 << 24,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context that the model was first trained on.

    Attributes:
        rope_type: "linear" divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595); "llama3" divides
            only the slow ones and blends in between (Llama 3.1; the arithmetic of transformers' `rope_type="llama3"`).
        factor: how many times longer the context becomes; at least 1.
        low_freq_factor: llama3 only; wavelengths above original_max_position_embeddings / this are divided fully.
        high_freq_factor: llama3 only; wavelengths below original_max_position_embeddings / this are kept.
        original_max_position_embeddings: llama3 only; the context of the first training, in tokens.

    Raises:
        InvalidInput: a number is out of its range.
        Unsupported: another rope_type.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in _ROPE_TYPES:
            raise Unsupported(f"rope_type is {self.rope_type!r}; this build has default, {', '.join(_ROPE_TYPES)}.")
        _check_number("rope_scaling.factor", self.factor, 1.0, 1e6)
        _check_number("rope_scaling.low_freq_factor", self.low_freq_factor, 1e-6, 1e6)
        _check_number("rope_scaling.high_freq_factor", self.high_freq_factor, 1e-6, 1e6)
        context = self.original_max_position_embeddings
        check_int("rope_scaling.original_max_position_embeddings", context, 1, _SIZE_LIMITS["max_position_embeddings"])
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise InvalidInput(
                f"rope_scaling.high_freq_factor is {self.high_freq_factor}; it must be greater than low_freq_factor "
                f"({self.low_freq_factor})."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that decides the shapes and the arithmetic of a decoder; the names are Hugging Face's.

    Attributes:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated feed-forward layer.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads; divides num_attention_heads.
        head_dim: elements of one head; even.
        max_position_embeddings: the longest sequence that the model is meant for, in tokens.
        rms_norm_eps: added to the mean square before its root.
        rope_theta: base of the rotary frequencies.
        rope_scaling: None for the default frequencies.
        tie_word_embeddings: the output projection is the embedding.
        attention_bias: the query, key and value projections have a bias.
        attention_output_bias: the output projection of attention has one.
        mlp_bias: the three feed-forward projections have one.
        sliding_window: tokens that a query sees, its own included; None for all.
        dtype: of the parameters and the computation, by name: float32, bfloat16 or float16.
        bos_token_id: the token that starts a document, or None.
        eos_token_ids: the tokens that end a generation.

    Raises:
        InvalidInput: a value of the wrong type or outside its limits.

    Example:
        >>> config = ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        >>> config.num_parameters
        106816
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, limit in _SIZE_LIMITS.items():
            check_int(name, getattr(self, name), 1, limit)
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidInput(
                f"num_attention_heads is {self.num_attention_heads}; it must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})."
            )
        if self.head_dim % 2:
            raise InvalidInput(f"head_dim is {self.head_dim}; rotary embeddings need an even number.")
        _check_number("rms_norm_eps", self.rms_norm_eps, 1e-12, 1.0)
        _check_number("rope_theta", self.rope_theta, 1.0, 1e12)
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise InvalidInput(f"rope_scaling is {self.rope_scaling!r}; it must be a RopeScaling or None.")
        for name in ("tie_word_embeddings", "attention_bias", "attention_output_bias", "mlp_bias"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(f"{name} is {getattr(self, name)!r}; it must be true or false.")
        if self.sliding_window is not None:
            check_int("sliding_window", self.sliding_window, 1, _SIZE_LIMITS["max_position_embeddings"])
        if self.dtype not in QUERY_DTYPES:
            raise InvalidInput(f"dtype is {self.dtype!r}; it must be one of {', '.join(QUERY_DTYPES)}.")
        self._check_tokens()

    def _check_tokens(self) -> None:
        named = [("bos_token_id", self.bos_token_id)] if self.bos_token_id is not None else []
        named += [(f"eos_token_ids[{index}]", token) for index, token in enumerate(self.eos_token_ids)]
        for name, token in named:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise InvalidInput(f"{name} is {shown(token)}; it must be a token id from 0 to {self.vocab_size - 1}.")

    @property
    def query_size(self) -> int:
        """Elements of all query heads of one token."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Elements of all key heads (or all value heads) of one token."""
        return self.num_key_value_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """How many numbers the model has, a tied head counted once."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.key_value_size)
        attention += self.attention_bias * (self.query_size + 2 * self.key_value_size)
        attention += self.attention_output_bias * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        layers = self.num_hidden_layers * (attention + mlp + 2 * self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return layers + embeddings + self.hidden_size


def _check_number(name: str, value: object, low: float, high: float) -> None:
    # An int may be larger than any float, so it is compared, never converted.
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite:
        raise InvalidInput(f"{name} is {value!r}; it must be a finite number from {low:g} to {high:g}.")
    if not low <= value <= high:
        raise InvalidInput(f"{name} is {shown(value)}; it must be from {low:g} to {high:g}.")
