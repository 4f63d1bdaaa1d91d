"""The fields of a ModelConfig by kind: those that are parts with a config of their own, and those that are sizes."""

from __future__ import annotations

from types import MappingProxyType

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.mixers import DeltaNetConfig, KimiDeltaConfig, LightningConfig, MambaConfig, ShortConvConfig
from jattn.llm.models.parts import (
    FullAttentionConfig,
    LatentConfig,
    MoEConfig,
    PerLayerInputConfig,
    TemperatureConfig,
    ValueHeadConfig,
)
from torch_core.base.limits import limits_of

#: The configs of the parts that a model may have, by their fields.
PARTS = MappingProxyType(
    {
        "moe": MoEConfig,
        "temperature": TemperatureConfig,
        "latent": LatentConfig,
        "full_attention": FullAttentionConfig,
        "value_head": ValueHeadConfig,
        "per_layer_input": PerLayerInputConfig,
        "short_conv": ShortConvConfig,
        "delta_net": DeltaNetConfig,
        "kimi_delta": KimiDeltaConfig,
        "lightning": LightningConfig,
        "mamba": MambaConfig,
    }
)
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES += ("num_key_value_heads", "head_dim", "max_position_embeddings")
#: The upper limits of the fields that are sizes.
SIZE_LIMITS = {name: int(limits_of(ModelConfig)[name].high or 0) for name in _SIZES}
