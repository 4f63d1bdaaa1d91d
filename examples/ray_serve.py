"""Replicas over machines with Ray Serve: each is one engine on GPUs of one host, behind Ray's HTTP proxies.

serve run examples.ray_serve:build model=DIR num_replicas=4 tensor_parallel_size=2

Replicas exchange nothing, so they may stand anywhere; Ray restarts them, routes requests and answers at
/v1/completions as `jattn serve` does. Ray gives each replica GPUs of its own (CUDA_VISIBLE_DEVICES), which are all that
JAX sees there. For one model over several hosts see `--coordinator` in docs/scale.md instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jattn import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `serve run` or a Ray config file may give.

    Attributes:
        model: a Hugging Face folder that every machine has; the embedded model if empty.
        num_replicas: engines.
        tensor_parallel_size: GPUs of one engine.
        num_gpus: of one engine; tensor_parallel_size by default, 0 to run on CPUs.
        max_num_seqs: sequences of one step.
        kv_cache_bytes: of the cache on each GPU; 0 for nine tenths of what is free there.
        max_unfinished: requests that one replica takes before Ray gives them to another.
    """

    model: str = ""
    num_replicas: int = 1
    tensor_parallel_size: int = 1
    num_gpus: int = -1
    max_num_seqs: int = 64
    kv_cache_bytes: int = 0
    max_unfinished: int = 256

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Returns the settings of a mapping whose numbers may be text, as on a command line.

        Raises:
            InvalidInput: a name that there is not, or no whole number.
        """
        kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(cls)}
        if unknown := given.keys() - kinds.keys():
            raise InvalidInput(f"{min(unknown)} is no setting; there are {', '.join(kinds)}.")
        try:
            found = cls(**{name: kinds[name](value) for name, value in given.items()})
        except ValueError as error:
            raise InvalidInput(f"settings are {dict(given)}; all but model are whole numbers: {error}.") from None
        for name in kinds.keys() - {"model", "num_gpus"}:
            low = 0 if name == "kv_cache_bytes" else 1
            if getattr(found, name) < low:
                raise InvalidInput(f"{name} is {getattr(found, name)}; it must be at least {low}.")
        return found

    @property
    def deployment(self) -> dict[str, Any]:
        """Options of Ray's deployment."""
        num_gpus = self.tensor_parallel_size if self.num_gpus < 0 else self.num_gpus
        return {
            "name": "jattn",
            "num_replicas": self.num_replicas,
            "max_ongoing_requests": self.max_unfinished,
            "ray_actor_options": {"num_gpus": num_gpus},
            # A replica loads weights and compiles before it answers.
            "health_check_timeout_s": 60,
            "graceful_shutdown_timeout_s": 60,
        }


def engine_app(settings: Settings) -> Any:
    """Returns the ASGI application of one replica: an engine of its own behind OpenAI's interface."""
    # Here: in the program that deploys, nothing should ask for a device.
    from jattn import LLM, EngineConfig
    from jattn.llm.load import embedded_model_folder
    from jattn.llm.serve.app import ServeConfig, create_app
    from jattn.llm.serve.async_llm import AsyncLLM

    folder = Path(settings.model) if settings.model else embedded_model_folder()
    config = EngineConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max(2048, settings.max_num_seqs),
        kv_cache_bytes=settings.kv_cache_bytes or None,
        tensor_parallel_size=settings.tensor_parallel_size,
    )
    llm = LLM(folder, config=config, use_generation_config=True)
    served = ServeConfig(
        model_name=folder.resolve().name if settings.model else "jattn",
        max_unfinished=settings.max_unfinished,
        default_sampling=llm.default_sampling,
    )
    return create_app(AsyncLLM(llm), served)


def build(given: Mapping[str, Any]) -> Any:
    """Returns the Ray Serve application; `serve run` calls it with what follows its name.

    Raises:
        InvalidInput: settings that are none.
        ImportError: Ray is not installed.
    """
    settings = Settings.of(given)
    try:
        from ray import serve  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("this example deploys with Ray Serve: pip install 'ray[serve]'.") from error

    def app() -> Any:
        return engine_app(settings)

    return serve.deployment(serve.ingress(app)()).options(**settings.deployment).bind()


if __name__ == "__main__":
    from ray import serve  # pyright: ignore[reportMissingImports]

    serve.run(build({}), blocking=True)
