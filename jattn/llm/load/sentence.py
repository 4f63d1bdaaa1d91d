"""The files that sentence-transformers adds to a model: pooling, dense layers, prompts, lower case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jattn.llm.load.folder import member, read_list, read_object, read_text
from jattn.llm.load.safetensors_file import open_safetensors
from jattn.llm.load.tensor_file import STORED_DTYPES, read_tensor
from jattn.llm.models.config_fields import SIZE_LIMITS
from torch_core.base.checks import check_bool, check_int, shown
from torch_core.base.errors import InvalidInput

_MODULES, _CONFIG = "modules.json", "config_sentence_transformers.json"
#: Older writers name the file after the model.
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_OF_TEXTS = tuple(f"sentence_{kind}_config.json" for kind in _KINDS)
#: The files' names of poolings; the older ones are flags.
_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_FLAGS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "lasttoken": "pooling_mode_lasttoken"}
#: Names of other packages are of code that folders bring.
_PACKAGE = "sentence_transformers."
#: No published folder has more than five; each dense layer is memory.
_MOST_MODULES = 64
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
        do_lower_case: texts are read in lower case, their prompts too.
        unserved: modules of the folder that this build does not have; its vectors would be others.
    """

    pooling: str | None = None
    dense: tuple[SentenceDense, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    do_lower_case: bool = False
    unserved: tuple[str, ...] = ()

    def prompt(self, name: str | None) -> str:
        """Returns what a text begins with; `name` is None for the folder's default, and "" for nothing.

        Raises:
            InvalidInput: the folder has no such prompt.
        """
        if not isinstance(name, str | None):
            raise InvalidInput("prompt_name", value=name, wanted="it must be a string, or None")
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
    pooling, dense, unserved, lower = None, [], [], False
    kinds = [
        (kind.rpartition(".")[2] if kind.startswith(_PACKAGE) else kind, where) for kind, where in _entries(folder)
    ]
    for place, (name, where) in enumerate(kinds):
        layer = None
        if name == "Pooling" and pooling is None and not dense:
            layer = pooling = _pooling(folder, where)
        elif name == "Dense" and (layer := _dense(folder, where)) is not None:
            dense.append(layer)
        elif name == "Transformer" and not place:
            layer, lower = True, _is_lower(folder, where)
        # A scale of the length between two modules changes the results of the second one.
        is_served = layer or (name == "Normalize" and place == len(kinds) - 1)
        unserved += [] if is_served else [f"{shown(name)} of {shown(where)}"]
    own = {"prompts": prompts, "default_prompt_name": default, "do_lower_case": lower}
    return SentenceModules(pooling=pooling, dense=tuple(dense), unserved=tuple(unserved), **own)


def _entries(folder: Path) -> list[tuple[str, str]]:
    """Returns the type and the folder of each module."""
    file = member(folder, _MODULES, max_bytes=1 << 20)
    entries = [] if file is None else read_list(read_text(file), _MODULES)
    if len(entries) > _MOST_MODULES:
        raise InvalidInput(_MODULES, f"has {len(entries)} entries", f"at most {_MOST_MODULES} are read")
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("type", "path")):
            raise InvalidInput(_MODULES, f"has the entry {shown(entry)}", "each has a type and a path, which are text")
    return [(entry["type"], entry["path"]) for entry in entries]


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    if member(folder, _CONFIG) is None:
        return {}, None
    raw = read_object(folder, _CONFIG)
    prompts, default = raw.get("prompts"), raw.get("default_prompt_name")
    prompts = {} if prompts is None else prompts
    if not isinstance(prompts, dict) or any(not isinstance(text, str) for text in prompts.values()):
        raise InvalidInput("prompts", value=prompts, wanted="it must be texts by name").under(_CONFIG)
    if default is not None and default not in [*prompts]:
        wanted = f"prompts has {', '.join(map(repr, prompts))}"
        raise InvalidInput("default_prompt_name", value=default, wanted=wanted).under(_CONFIG)
    return prompts, default


def _is_lower(folder: Path, where: str) -> bool:
    name = next((name for name in _OF_TEXTS if member(folder, name, inside=where) is not None), None)
    raw = {} if name is None else read_object(folder, name, inside=where)
    lower = False if raw.get("do_lower_case") is None else raw["do_lower_case"]
    try:
        check_bool("do_lower_case", lower)
    except InvalidInput as error:
        raise error.under(f"{where}/{name}" if where else str(name)) from None
    return lower


def _pooling(folder: Path, where: str) -> str | None:
    """Returns the pooling; None for one that is not served, several that are joined, or one without the prompt."""
    raw = _config(folder, where)
    if raw.get("include_prompt") not in (None, True):
        return None
    modes = raw.get("pooling_mode")
    if modes is None:
        flags = {key for key, value in raw.items() if key.startswith("pooling_mode_") and value is True}
        modes = [mode for mode, flag in _FLAGS.items() if flag in flags] if flags <= {*_FLAGS.values()} else []
    mode = modes[0] if isinstance(modes, list) and len(modes) == 1 else modes
    return _POOLINGS.get(mode) if isinstance(mode, str) else None


def _dense(folder: Path, where: str) -> SentenceDense | None:
    """Returns the layer; None for another activation, of tokens, or one that is stored otherwise."""
    raw = {"activation_function": "torch.nn.modules.activation.Tanh", "bias": True, **_config(folder, where)}
    activation = _ACTIVATIONS.get(str(raw["activation_function"]))
    is_of_texts = all(raw.get(f"module_{side}_name") in (None, "sentence_embedding") for side in ("input", "output"))
    path = member(folder, "model.safetensors", inside=where)
    if path is None or activation is None or not is_of_texts:
        return None
    try:
        check_bool("bias", raw["bias"])
        for key in ("out_features", "in_features"):
            check_int(key, raw.get(key), 1, SIZE_LIMITS["hidden_size"])
    except InvalidInput as error:
        raise error.under(f"{where}/config.json") from None
    file, shape = open_safetensors(path), (raw["out_features"], raw["in_features"])
    wanted = {"linear.weight": shape} | ({"linear.bias": shape[:1]} if raw["bias"] else {})
    stored = {name: tensor.shape for name, tensor in file.tensors.items()}
    if stored != wanted:
        raise InvalidInput(f"{where}/model.safetensors", f"has the tensors {shown(stored)}", f"its config has {wanted}")
    if any(tensor.code not in STORED_DTYPES for tensor in file.tensors.values()):
        return None
    arrays = {name: np.array(read_tensor(file, name), np.float32) for name in wanted}
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise InvalidInput(f"{where}/model.safetensors", f"has NaN or infinite numbers in {name}")
    return SentenceDense(np.ascontiguousarray(arrays["linear.weight"].T), arrays.get("linear.bias"), activation)


def _config(folder: Path, where: str) -> dict[str, Any]:
    """Returns the config of a module, in the folder that modules.json names."""
    return read_object(folder, "config.json", inside=where)
