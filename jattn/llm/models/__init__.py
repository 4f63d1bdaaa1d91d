"""Language models in Flax nnx: one decoder whose options a config switches on, alone or with an encoder."""

from __future__ import annotations

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.decoder import Decoder
from jattn.llm.models.encoder_decoder import EncoderDecoder
from jattn.llm.models.mixers import DeltaNetConfig, ShortConvConfig
from jattn.llm.models.paged_model import EncoderModel, PagedModel, PagedSpec, RoutedModel
from jattn.llm.models.parts import LatentConfig, MoEConfig, RopeScaling, last_of_each_window
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
    "Decoder",
    "DeltaNetConfig",
    "EncoderDecoder",
    "EncoderModel",
    "Fp8Linear",
    "LatentConfig",
    "LayerCache",
    "MoEConfig",
    "ModelConfig",
    "PagedCache",
    "PagedModel",
    "PagedSpec",
    "ParameterShards",
    "RopeScaling",
    "RoutedModel",
    "Served",
    "ShortConvConfig",
    "TensorParallel",
    "decoder_of",
    "last_of_each_window",
    "logical_axes",
    "num_parameters",
    "parameter_shards",
    "partition_specs",
    "put_whole",
    "quantize_fp8",
    "shard_model",
    "tensor_parallel_of",
]
