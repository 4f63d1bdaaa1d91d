"""Language models in Flax nnx: one decoder whose options a config switches on, alone or with an encoder."""

from __future__ import annotations

from jattn.models.config import ModelConfig
from jattn.models.decoder import Decoder
from jattn.models.encoder_decoder import EncoderDecoder
from jattn.models.paged_model import EncoderModel, PagedModel, PagedSpec
from jattn.models.parts import LatentConfig, MoEConfig, last_of_each_window
from jattn.models.rope_scaling import RopeScaling

__all__ = [
    "Decoder",
    "EncoderDecoder",
    "EncoderModel",
    "LatentConfig",
    "MoEConfig",
    "ModelConfig",
    "PagedModel",
    "PagedSpec",
    "RopeScaling",
    "last_of_each_window",
]
