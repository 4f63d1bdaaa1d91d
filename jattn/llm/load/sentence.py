"""The files that sentence-transformers adds to a model: pooling, dense layers, prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jattn.llm.load.folder import member, read_list, read_object, read_text
from jattn.llm.load.safetensors_file import open_safetensors
from jattn.llm.load.tensor_file import read_tensor
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput

_MODULES, _CONFIG = "modules.json", "config_sentence_transformers.json"
#: The files' names of poolings; the older ones are flags.
_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_FLAGS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "lasttoken": "pooling_mode_lasttoken"}
_ACTIVATIONS = {"torch.nn.modules.linear.Identity": "identity", "torch.nn.modules.activation.Tanh": "tanh"}


@dataclass(frozen=True, slots=True, eq=False)
class SentenceDense:
    """A linear layer after the pooling.

    Attributes:
        kernel: float32[in_features, out_features].
        bias: float32[out_features], or None.
        activation: "identity" or "tanh".
    """

    kernel: np.ndarray
    bias: np.ndarray | None
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentenceModules:
    """What a folder says about vectors of texts, as sentence-transformers reads it (arXiv:1908.10084).

    Attributes:
        pooling: "mean", "cls" or "last"; None if the folder has none of these.
        dense: the linear layers after it.
        prompts: what a text begins with, by the name of its use.
        default_prompt_name: the use of a text of which nothing is said; None for no prompt.
        unserved: modules of the folder that this build does not have; its vectors would be others.
    """

    pooling: str | None = None
    dense: tuple[SentenceDense, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    unserved: tuple[str, ...] = ()

    def prompt(self, name: str | None) -> str:
        """Returns what a text begins with; `name` is None for the folder's default, and "" for nothing.

        Raises:
            InvalidInput: the folder has no such prompt.
        """
        name = self.default_prompt_name if name is None else name
        if not name:
            return ""
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise InvalidInput("prompt_name", value=name, wanted=f"the model's folder has {known}")
        return self.prompts[name]


def read_sentence_modules(folder: Path) -> SentenceModules:
    """Reads modules.json and config_sentence_transformers.json of a checked folder; without them nothing is set."""
    prompts, default = _prompts(folder)
    found: dict[str, Any] = {"prompts": prompts, "default_prompt_name": default}
    file, dense, unserved = member(folder, _MODULES, max_bytes=1 << 20), [], []
    for entry in [] if file is None else read_list(read_text(file), _MODULES):
        kind, where = (entry.get(key) for key in ("type", "path")) if isinstance(entry, Mapping) else (None, None)
        if not isinstance(kind, str) or not isinstance(where, str):
            raise InvalidInput(_MODULES, f"has the entry {shown(entry)}", "each has a type and a path, which are text")
        name = kind.rpartition(".")[2]
        if name == "Pooling" and not dense:
            found["pooling"] = _pooling(folder, where)
            unserved += [] if found["pooling"] else [f"{name} of {where}"]
        elif name == "Dense" and (layer := _dense(folder, where)) is not None:
            dense.append(layer)
        elif name not in ("Transformer", "Normalize"):
            unserved.append(f"{name} of {where}")
    return SentenceModules(**found, dense=tuple(dense), unserved=tuple(unserved))


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    if member(folder, _CONFIG) is None:
        return {}, None
    raw = read_object(folder, _CONFIG)
    prompts, default = raw.get("prompts") or {}, raw.get("default_prompt_name")
    if not isinstance(prompts, dict) or any(not isinstance(text, str) for text in prompts.values()):
        raise InvalidInput("prompts", value=prompts, wanted="it must be texts by name").under(_CONFIG)
    if default is not None and default not in prompts:
        wanted = f"prompts has {', '.join(map(repr, prompts))}"
        raise InvalidInput("default_prompt_name", value=default, wanted=wanted).under(_CONFIG)
    return prompts, default


def _pooling(folder: Path, where: str) -> str | None:
    """Returns the pooling; None for one that is not served, or several that are joined."""
    raw = _config(folder, where)
    modes = raw.get("pooling_mode")
    if modes is None:
        flags = {key for key, value in raw.items() if key.startswith("pooling_mode_") and value is True}
        modes = [mode for mode, flag in _FLAGS.items() if flag in flags] if flags <= {*_FLAGS.values()} else []
    mode = modes[0] if isinstance(modes, list) and len(modes) == 1 else modes
    return _POOLINGS.get(mode) if isinstance(mode, str) else None


def _dense(folder: Path, where: str) -> SentenceDense | None:
    """Returns the layer; None for another activation, or one that is stored otherwise."""
    raw = _config(folder, where)
    activation = _ACTIVATIONS.get(str(raw.get("activation_function", "torch.nn.modules.activation.Tanh")))
    path = member(folder, "model.safetensors", inside=where)
    if path is None or activation is None:
        return None
    file, shape = open_safetensors(path), (raw.get("out_features"), raw.get("in_features"))
    wanted = {"linear.weight": shape} | ({"linear.bias": shape[:1]} if raw.get("bias", True) else {})
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    if shapes != wanted:
        raise InvalidInput(f"{where}/model.safetensors", f"has the tensors {shown(shapes)}", f"its config has {wanted}")
    arrays = {name: np.array(read_tensor(file, name), np.float32) for name in wanted}
    return SentenceDense(np.ascontiguousarray(arrays["linear.weight"].T), arrays.get("linear.bias"), activation)


def _config(folder: Path, where: str) -> dict[str, Any]:
    """Returns the config of a module, in the folder that modules.json names."""
    return read_object(folder, "config.json", inside=where)
