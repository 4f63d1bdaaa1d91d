"""Language models in Flax nnx: one decoder whose options a config switches on, alone or with an encoder."""

from __future__ import annotations

from jattn.llm.models.adapter_targets import AdapterTarget, adapter_targets, chosen_targets
from jattn.llm.models.adapters import Adapters, lora_scaling
from jattn.llm.models.batch_adapters import EMBEDDING, HEAD, BatchAdapters, LoraWeights
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.decoder import Decoder
from jattn.llm.models.encoder_decoder import EncoderDecoder
from jattn.llm.models.invariance import set_batch_invariant
from jattn.llm.models.mixers import DeltaNetConfig, KimiDeltaConfig, MambaConfig, ShortConvConfig
from jattn.llm.models.paged_model import EncoderModel, PagedModel, PagedSpec, RoutedModel
from jattn.llm.models.parts import (
    FullAttentionConfig,
    LatentConfig,
    MoEConfig,
    PerLayerInputConfig,
    RopeScaling,
    TemperatureConfig,
    last_of_each_window,
)
from jattn.llm.models.quantized import Fp8Linear, quantize_fp8
from jattn.llm.models.served import LayerCache, PagedCache, Served
from jattn.llm.models.shapes import num_parameters
from jattn.llm.models.sharding import (
    ParameterShards,
    decoder_of,
    parameter_shards,
    put_whole,
    shard_model,
    tensor_parallel_of,
)
from jattn.llm.models.tensor_parallel import DEFAULT_RULES, TensorParallel, logical_axes, partition_specs

__all__ = [
    "DEFAULT_RULES",
    "EMBEDDING",
    "HEAD",
    "AdapterTarget",
    "Adapters",
    "BatchAdapters",
    "Decoder",
    "DeltaNetConfig",
    "EncoderDecoder",
    "EncoderModel",
    "Fp8Linear",
    "FullAttentionConfig",
    "KimiDeltaConfig",
    "LatentConfig",
    "LayerCache",
    "LoraWeights",
    "MambaConfig",
    "MoEConfig",
    "ModelConfig",
    "PagedCache",
    "PagedModel",
    "PagedSpec",
    "ParameterShards",
    "PerLayerInputConfig",
    "RopeScaling",
    "RoutedModel",
    "Served",
    "ShortConvConfig",
    "TemperatureConfig",
    "TensorParallel",
    "adapter_targets",
    "chosen_targets",
    "decoder_of",
    "last_of_each_window",
    "logical_axes",
    "lora_scaling",
    "num_parameters",
    "parameter_shards",
    "partition_specs",
    "put_whole",
    "quantize_fp8",
    "set_batch_invariant",
    "shard_model",
    "tensor_parallel_of",
]
