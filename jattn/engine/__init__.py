"""Generation: requests, continuous batching, jitted steps over a donated pool, sampling on the device."""

from jattn.engine.config import EngineConfig
from jattn.engine.delivery import Outbox, TokenDelta
from jattn.engine.engine import Engine
from jattn.engine.llm import LLM, generate
from jattn.engine.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from jattn.engine.stream import TextDelta, TextStream

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Outbox",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TextDelta",
    "TextStream",
    "TokenDelta",
    "generate",
]
