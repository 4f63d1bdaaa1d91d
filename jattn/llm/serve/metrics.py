"""Metrics for Prometheus: counts, times and the state of the cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from jattn.llm.engine import RequestOutput
from jattn.llm.serve.async_llm import AsyncLLM
from jattn.llm.serve.models import ModelList
from torch_core.base.errors import EngineClosed

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class _State:
    """The engines' own figures, read when they are asked for."""

    def __init__(self, models: ModelList) -> None:
        self._models = models

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for model in self._models:
            # A closed engine has no figures; those of the server stay.
            with contextlib.suppress(EngineClosed):
                for kind, name, text, value in self._figures(model.llm) if model.llm.llm.generates else ():
                    family = families.setdefault(name, kind(name, text, labels=["model_name"]))
                    family.add_metric([model.name], value)
        yield from families.values()

    def _figures(self, llm: AsyncLLM) -> Iterator[tuple[Any, str, str, float]]:
        engine = llm.llm.engine
        stats, speculation = engine.cache_stats(), engine.speculation_stats()
        usable = stats.num_blocks - stats.null
        for name, text, value in (
            ("jattn_unfinished_samples", "Samples that wait or run.", llm.num_unfinished),
            ("jattn_kv_cache_usage", "Share of the pool's blocks that requests hold.", stats.used / usable),
        ):
            yield GaugeMetricFamily, name, text, value
        for name, text, value in (
            ("jattn_prefix_cache_queried_tokens", "Prompt tokens looked up in the prefix cache.", stats.queried_tokens),
            ("jattn_prefix_cache_hit_tokens", "Prompt tokens found there.", stats.hit_tokens),
            ("jattn_preemptions", "Requests whose blocks were taken away.", stats.preemptions),
            ("jattn_spec_decode_num_drafts", "Times that tokens were guessed.", speculation.num_drafts),
            ("jattn_spec_decode_num_draft_tokens", "Tokens guessed.", speculation.num_draft_tokens),
            ("jattn_spec_decode_num_accepted_tokens", "Guesses that came true.", speculation.num_accepted_tokens),
            ("jattn_programs", "Programs compiled so far.", len(engine.programs)),
        ):
            yield CounterMetricFamily, name, text, value


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, models: ModelList) -> None:
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry}
        self._registry.register(_State(models))
        self._finished = Counter("jattn_requests", "Samples that ended.", ["finish_reason"], **own)
        self._prompt_tokens = Counter("jattn_prompt_tokens", "Tokens of prompts.", **own)
        self._new_tokens = Counter("jattn_generation_tokens", "Tokens generated.", **own)
        self._refused = Counter("jattn_refused_requests", "Requests that were refused, or failed.", ["status"], **own)
        seconds: dict[str, Any] = own | {"buckets": _SECONDS}
        self._first = Histogram("jattn_time_to_first_token_seconds", "From arrival.", **seconds)
        self._each = Histogram("jattn_time_per_output_token_seconds", "After the first, mean of a request.", **seconds)
        self._whole = Histogram("jattn_e2e_request_latency_seconds", "From arrival to the last token.", **seconds)

    def refused(self, status: int) -> None:
        """Counts a refusal."""
        self._refused.labels(str(status)).inc()

    def finished(self, output: RequestOutput) -> None:
        """Counts a request that ended."""
        self._prompt_tokens.inc(len(output.prompt_token_ids))
        for completion in output.outputs:
            self._finished.labels(completion.finish_reason).inc()
            self._new_tokens.inc(len(completion.token_ids))
        times, count = output.metrics, len(output.outputs[0].token_ids)
        if times.first_token_time is not None and times.finish_time is not None:
            self._first.observe(times.first_token_time - times.arrival_time)
            self._whole.observe(times.finish_time - times.arrival_time)
            if count > 1:
                self._each.observe((times.finish_time - times.first_token_time) / (count - 1))

    def text(self) -> bytes:
        """Returns Prometheus' text format; it may wait for a step of the engine."""
        return generate_latest(self._registry)
