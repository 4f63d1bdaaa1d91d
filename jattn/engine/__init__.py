"""Generation: requests, continuous batching, jitted steps over a donated pool, sampling on the device."""

from jattn.engine.config import EngineConfig
from jattn.engine.engine import Engine, TokenDelta
from jattn.engine.llm import LLM, TextDelta, generate
from jattn.engine.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TextDelta",
    "TokenDelta",
    "generate",
]
