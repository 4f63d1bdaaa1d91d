"""Generation: requests, continuous batching, jitted steps over a donated pool, sampling on the device."""

from jattn.llm.engine.calibrate import calibrate_kv_cache
from jattn.llm.engine.config import EngineConfig
from jattn.llm.engine.delivery import Outbox, TokenDelta
from jattn.llm.engine.embeddings import EmbeddingOutput, EmbeddingRequestOutput
from jattn.llm.engine.engine import Engine
from jattn.llm.engine.kv_scales import KVCacheScales
from jattn.llm.engine.llm import LLM, generate
from jattn.llm.engine.logprobs import Logprob
from jattn.llm.engine.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from jattn.llm.engine.processes import join
from jattn.llm.engine.replicas import DataParallelEngine, open_engine
from jattn.llm.engine.request import CompletionOutput, RequestMetrics, RequestOutput
from jattn.llm.engine.speculation import SpeculationStats, SpeculativeConfig
from jattn.llm.engine.stream import TextDelta, TextStream

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
