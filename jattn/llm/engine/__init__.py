"""Generation: requests, continuous batching, jitted steps over a donated pool, sampling on the device."""

from jattn.llm.engine.clients.engine import Engine
from jattn.llm.engine.clients.llm import LLM, generate
from jattn.llm.engine.clients.replicas import DataParallelEngine, open_engine
from jattn.llm.engine.clients.stream import TextDelta, TextStream
from jattn.llm.engine.clients.verify import Verification
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.options.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from jattn.llm.engine.options.speculation import SpeculationStats, SpeculativeConfig
from jattn.llm.engine.request.lora import LoRARequest
from jattn.llm.engine.request.outputs import (
    CompletionOutput,
    Logprob,
    Outbox,
    RequestMetrics,
    RequestOutput,
    SamplingMask,
    TokenDelta,
)
from jattn.llm.load.calibrate import calibrate_kv_cache
from jattn.llm.load.kv_scales import KVCacheScales
from jattn.llm.processes import join
from jattn.llm.text.embeddings import EmbeddingOutput, EmbeddingRequestOutput
from jattn.llm.text.scores import ScoringOutput, ScoringRequestOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "DataParallelEngine",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineConfig",
    "KVCacheScales",
    "LoRARequest",
    "Logprob",
    "Outbox",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingMask",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SpeculationStats",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "TextDelta",
    "TextStream",
    "TokenDelta",
    "Verification",
    "calibrate_kv_cache",
    "generate",
    "join",
    "open_engine",
]
