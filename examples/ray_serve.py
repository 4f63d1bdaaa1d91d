"""Replicas over machines with Ray Serve: each is one engine on the GPUs of one host, behind Ray's HTTP proxies.

serve run examples.ray_serve:build model=DIR num_replicas=4 tensor_parallel_size=2

Replicas exchange nothing, so they may run anywhere. Ray restarts them, routes requests and answers at /v1/completions
as `jattn serve` does. Ray gives each replica its own GPUs (CUDA_VISIBLE_DEVICES), and JAX sees only these. For one
model over several hosts see `--coordinator` in docs/explanation/devices.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jattn import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of `serve run` or of a Ray config file.

    Attributes:
        model: path of a Hugging Face folder on every machine; the embedded model if empty.
        num_replicas: number of engines.
        tensor_parallel_size: number of GPUs of one engine.
        num_gpus: GPUs that Ray reserves for one engine; tensor_parallel_size by default, 0 to run on CPUs.
        max_num_seqs: most sequences of one step.
        kv_cache_bytes: size of the cache on each GPU, in bytes; 0 for nine tenths of the free memory.
        max_unfinished: number of requests that one replica takes before Ray sends them to another.
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
        """Converts a mapping, whose numbers may be text as on a command line, to settings.

        Raises:
            InvalidInput: an unknown name, or a value that is not a whole number.
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
            # A replica loads its weights and compiles before it answers.
            "health_check_timeout_s": 60,
            "graceful_shutdown_timeout_s": 60,
        }


def engine_app(settings: Settings) -> Any:
    """Returns the ASGI application of one replica: its own engine behind OpenAI's interface."""
    # Imported here: the program that deploys should not use a device.
    from jattn import LLM, EngineConfig
    from jattn.llm.load import embedded_model_folder
    from jattn.llm.serve.app import create_app
    from jattn.llm.serve.async_llm import AsyncLLM
    from jattn.llm.serve.config import ServeConfig

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
    )
    return create_app(AsyncLLM(llm), served)


def build(given: Mapping[str, Any]) -> Any:
    """Returns the Ray Serve application; `serve run` calls it with the settings that follow its name.

    Raises:
        InvalidInput: unknown or bad settings.
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
