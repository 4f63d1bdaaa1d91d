"""Decoder-only language models in Flax nnx, built from one config: the Llama family."""

from __future__ import annotations

from jattn.models.config import ModelConfig, RopeScaling
from jattn.models.decoder import Decoder
from jattn.models.paged_model import PagedModel, PagedSpec

__all__ = ["Decoder", "ModelConfig", "PagedModel", "PagedSpec", "RopeScaling"]
