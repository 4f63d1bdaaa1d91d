"""Generation: requests, continuous batching, jitted steps over a donated pool, sampling on the device."""

from jattn.engine.config import EngineConfig, MemoryPlan, plan_memory
from jattn.engine.engine import Engine, TokenDelta
from jattn.engine.llm import LLM, TextDelta, generate
from jattn.engine.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "MemoryPlan",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TextDelta",
    "TokenDelta",
    "generate",
    "plan_memory",
]
