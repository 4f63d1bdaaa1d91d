"""Generation: requests, continuous batching, jitted steps over a donated pool, sampling on the device."""

from jattn.engine.calibrate import calibrate_kv_cache
from jattn.engine.config import EngineConfig
from jattn.engine.delivery import Outbox, TokenDelta
from jattn.engine.embeddings import EmbeddingOutput, EmbeddingRequestOutput
from jattn.engine.engine import Engine
from jattn.engine.kv_scales import KVCacheScales
from jattn.engine.llm import LLM, generate
from jattn.engine.logprobs import Logprob
from jattn.engine.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from jattn.engine.processes import join
from jattn.engine.replicas import DataParallelEngine, open_engine
from jattn.engine.request import CompletionOutput, RequestMetrics, RequestOutput
from jattn.engine.speculation import SpeculationStats, SpeculativeConfig
from jattn.engine.stream import TextDelta, TextStream

__all__ = [
    "LLM",
    "CompletionOutput",
    "DataParallelEngine",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineConfig",
    "KVCacheScales",
    "Logprob",
    "Outbox",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SpeculationStats",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "TextDelta",
    "TextStream",
    "TokenDelta",
    "calibrate_kv_cache",
    "generate",
    "join",
    "open_engine",
]
