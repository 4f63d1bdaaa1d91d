"""TorchDecoder: a Llama-family decoder in plain torch, in any precision; the truth of the cross-check in float64."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from jattn.llm.load import parse_config
from jattn.llm.load.folder import check_folder, read_config
from jattn.llm.models import ModelConfig
from jattn.llm.models.config_fields import SIZE_LIMITS
from torch_core.attention.call import DenseCall
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import AttentionSpec
from torch_core.reference import attention

#: The supported options; every other option must be off.
_OPTIONS = (
    *SIZE_LIMITS,
    *("rms_norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings", "sliding_window", "bos_token_id"),
    *("attention_bias", "attention_output_bias", "mlp_bias"),
)
#: Keys and values of the tokens so far, one pair per layer, each `[tokens, num_kv_heads, head_dim]`.
Past = list[tuple[Tensor, Tensor]]


class TorchDecoder:
    """Computes logits of one sequence, with a plain list of keys and values instead of a cache.

    It shares nothing with the Flax model but `parse_config`: it reads the safetensors itself, keeps the file's tensors
    apart and as they lie there, and attends through `torch_core.reference`. With `compute_dtype` float64
    every step is float64, rotary angles included; transformers' own double precision computes norms and angles in
    float32.

    Args:
        folder: a Hugging Face folder that `jattn.llm.load.load_model` accepts.
        weight_dtype: weights are rounded to this first, so that they are those of the model under test.
        compute_dtype: dtype of the arithmetic, and of the logits.
        hf_overrides: values that replace those of config.json; see `jattn.llm.load.load_model`.

    Attributes:
        config: parsed from the folder's config.json.

    Raises:
        InvalidInput: the folder has no usable config.json or no safetensors.
        Unsupported: a model of another family.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        weight_dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype = torch.float32,
        hf_overrides: Mapping[str, Any] | None = None,
    ) -> None:
        path = check_folder(folder)
        self.config = config = parse_config(read_config(path, hf_overrides))
        if not self.serves(config):
            raise Unsupported(f"{config.architecture} has options that TorchDecoder does not compute.")
        self._dtype = compute_dtype
        # The dtype of norms and rotary embeddings: at least float32, as in every implementation of Llama.
        self._wide = torch.promote_types(compute_dtype, torch.float32)
        self._weights = {
            name: tensor.to(weight_dtype).to(compute_dtype) for name, tensor in _read_tensors(path).items()
        }
        self._frequencies = _inverse_frequencies(config).to(self._wide)
        window = config.sliding_window
        self._spec = AttentionSpec(
            scale=config.head_dim**-0.5, window_left=None if window is None else max(window - 1, 0)
        )

    @staticmethod
    def serves(config: ModelConfig) -> bool:
        """Returns whether a model has the options of Llama, Mistral and Qwen 2 alone, and one window for all layers."""
        plain = {name: getattr(config, name) for name in _OPTIONS}
        scaling = config.rope_scaling
        return (
            ModelConfig(**plain, dtype=config.dtype, eos_token_ids=config.eos_token_ids) == config
            and (scaling is None or scaling.rope_type in ("linear", "llama3"))
            and config.architecture in ("", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
        )

    @torch.no_grad()
    def __call__(self, token_ids: Sequence[int], past: Past | None = None) -> tuple[Tensor, Past]:
        """Returns the logits after each token, `[tokens, vocab_size]`, and the past for the next call.

        Args:
            token_ids: one or more tokens that follow those of `past`.
            past: result of the last call, not changed; None at the start of a sequence.
        """
        start = past[0][0].shape[0] if past else 0
        positions = torch.arange(start, start + len(token_ids), dtype=self._wide)
        angles = positions[:, None, None] * self._frequencies
        cosine, sine = angles.cos(), angles.sin()
        x = self._weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
        new_past = []
        for index in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{index}."
            attended, layer_past = self._attend(
                f"{prefix}self_attn.",
                self._norm(f"{prefix}input_layernorm", x),
                (cosine, sine),
                past[index] if past else None,
            )
            new_past.append(layer_past)
            x = x + attended
            x = x + self._feed_forward(f"{prefix}mlp.", self._norm(f"{prefix}post_attention_layernorm", x))
        x = self._norm("model.norm", x)
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return self._linear(head, x), new_past

    def _attend(
        self, prefix: str, x: Tensor, angles: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        query, key, value = (
            self._linear(f"{prefix}{name}_proj", x).unflatten(-1, (-1, self.config.head_dim)) for name in "qkv"
        )
        query, key = self._rotate(query, *angles), self._rotate(key, *angles)
        if past is not None:
            key, value = torch.cat([past[0], key]), torch.cat([past[1], value])
        call = DenseCall(
            query=query,
            key=key,
            value=value,
            query_start_loc=torch.tensor([0, query.shape[0]]),
            key_start_loc=torch.tensor([0, key.shape[0]]),
            spec=self._spec,
            max_query_len=query.shape[0],
        )
        output, _ = attention(call)
        return self._linear(f"{prefix}o_proj", output.flatten(-2)), (key, value)

    def _feed_forward(self, prefix: str, x: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(self._linear(f"{prefix}gate_proj", x))
        return self._linear(f"{prefix}down_proj", gate * self._linear(f"{prefix}up_proj", x))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        wide = x.to(self._wide)
        wide = wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + self.config.rms_norm_eps)
        return wide.to(self._dtype) * self._weights[f"{name}.weight"]

    def _rotate(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        first, second = heads.to(self._wide).chunk(2, dim=-1)
        rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
        return rotated.to(self._dtype)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidInput(f"folder {str(folder)!r} has no safetensors file.")
    tensors = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def _inverse_frequencies(config: ModelConfig) -> Tensor:
    """Returns the angle per position of each pair of elements in float64: Llama 3.1's published arithmetic."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    frequencies = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Short wavelengths are kept, long ones are divided by the factor.
    share = ((scaling.original_max_position_embeddings / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / scaling.factor + share * frequencies
