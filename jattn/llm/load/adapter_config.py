"""PEFT's adapter_config.json: ranks and scales of an adapter; what this build does not compute is refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jattn.llm.load.families import known_families
from jattn.llm.load.folder import read_object
from torch_core.adapters.call import MAX_RANK
from torch_core.base.checks import check_int, shown
from torch_core.base.errors import InvalidInput, Unsupported

#: Name of the file.
NAME = "adapter_config.json"
# Keys that change the results, and the values with which they do not.
_INERT: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_bdlora": (None, False),
    "ensure_weight_tying": (False, None),
    **dict.fromkeys(("arrow_config", "kasa_config", "monteclora_config", "velora_config"), (None, {})),
}
# Keys of PEFT 0.21 of training, of the writer's machine, or without an effect on an adapter's own products.
_IGNORED = (
    "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "task_type",
)  # fmt: skip
# Keys that are read here.
_READ = (
    "alpha_pattern", "auto_mapping", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "target_parameters", "use_rslora",
)  # fmt: skip
# Ways to initialise that leave the base's weights as they are; others change them.
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# Names of lists of layers, whose number is the first one in a module's name.
_LISTS = ("layers", "h", "blocks", "layer")
_LAYER = re.compile(r".*?\.(\d{1,9})\.")
# A name, all of it, or as PEFT writes the joined kernel of experts: ".*\.gate_up_proj".
_PATTERN = re.compile(r"(?:\^|\.\*\\\.)?[\w.]+")
_ANY_FRONT = ".*\\."
# Files in GGUF of models of the first one name the second, as which they are read.
_OF_GGUF = ("MistralForCausalLM", "LlamaForCausalLM")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The ranks and scales of an adapter.

    Attributes:
        r: rank.
        lora_alpha: the products are scaled by lora_alpha / r.
        use_rslora: by lora_alpha / sqrt(r) instead.
        rank_pattern, alpha_pattern: other values by the last parts of modules' names.
        target_parameters: names of parameters that have adapters, such as "mlp.experts.down_proj".
        target_modules: last parts of the names of modules that have adapters; None for a regular expression, which is
            not checked.
        exclude_modules: those that have none.
        layers: the layers that have adapters; None for all.
        base_model_class: the class of the base that the adapter was trained on; None where PEFT did not write it.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_parameters: tuple[str, ...] = ()
    target_modules: tuple[str, ...] | None = None
    exclude_modules: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    base_model_class: str | None = None

    def check_base(self, architecture: str) -> None:
        """Refuses an adapter of another known architecture, whose names and shapes may fit by chance.

        Raises:
            InvalidInput: it is one of another.
        """
        known = known_families()
        if (self.base_model_class, architecture) == _OF_GGUF:
            return
        if self.base_model_class != architecture and {self.base_model_class, architecture} <= known.keys():
            wanted = f"the model is {architecture}. Remove auto_mapping if the adapter is of these weights"
            raise InvalidInput("auto_mapping.base_model_class", value=self.base_model_class, wanted=wanted).under(NAME)

    def check_module(self, name: str) -> None:
        """Refuses the matrices of a module, or of a parameter, that PEFT would not apply, by this file.

        Raises:
            InvalidInput: it is none of the modules, or it is excluded.
        """
        if _ends_with(name, self.target_parameters) or _ends_with(f"{name}.weight", self.target_parameters):
            return
        text = f"leaves out {shown(name)}, of which the adapter has matrices"
        if self.target_modules is not None and not _ends_with(name, self.target_modules):
            raise InvalidInput("target_modules", text).under(NAME)
        if _ends_with(name, self.exclude_modules):
            raise InvalidInput("exclude_modules", f"has {shown(name)}, of which the adapter has matrices").under(NAME)
        if self.layers is not None:
            layer = _LAYER.match(name)
            if layer is None or int(layer[1]) not in self.layers:
                raise InvalidInput("layers_to_transform", text).under(NAME)

    def of_module(self, name: str) -> tuple[int, float]:
        """Returns rank and alpha of a module."""
        return _of(self.rank_pattern, name, self.r), _of(self.alpha_pattern, name, self.lora_alpha)


def read_peft_config(folder: Path) -> PeftConfig:
    """Reads adapter_config.json.

    Raises:
        InvalidInput: it is missing or broken, or a value is of the wrong type or out of range.
        Unsupported: another method than LoRA, DoRA, biases, saved modules, a changed base.
    """
    raw = read_object(folder, NAME)
    if raw.get("peft_type") != "LORA":
        raise Unsupported("peft_type", value=raw.get("peft_type"), wanted="this build reads LORA").under(NAME)
    for key, values in _INERT.items():
        if key in raw and raw[key] not in values:
            wanted = f"this build reads adapters with {shown(values[0])} there"
            raise Unsupported(key, value=raw[key], wanted=wanted).under(NAME)
    for key, value in raw.items():
        # What an unknown key with a value asks for would be missing.
        if key not in (*_INERT, *_IGNORED, *_READ) and value not in (None, False, [], {}):
            raise Unsupported(key, value=value, wanted="this build does not know the key. Leave it out").under(NAME)
    start = raw.get("init_lora_weights")
    if (start.lower() if isinstance(start, str) else start) not in _STARTS:
        wanted = "it may change the base's weights. Convert the adapter as PEFT's documentation of it says"
        raise Unsupported("init_lora_weights", value=start, wanted=wanted).under(NAME)
    rank, alpha, use_rslora = raw.get("r", 8), raw.get("lora_alpha", 8), raw.get("use_rslora", False)
    try:
        check_int("r", rank, 1, MAX_RANK)
        check_alpha("lora_alpha", alpha)
        if not isinstance(use_rslora, bool):
            raise InvalidInput("use_rslora", value=use_rslora, wanted="it must be true or false")
        ranks, alphas = _pattern(raw, "rank_pattern"), _pattern(raw, "alpha_pattern")
        targets = raw.get("target_modules")
        modules = None if targets is None or isinstance(targets, str) else _names(raw, "target_modules")
        excluded = () if isinstance(raw.get("exclude_modules"), str) else _names(raw, "exclude_modules")
        parameters, layers = _names(raw, "target_parameters"), _layers(raw)
        mapping = raw.get("auto_mapping")
        base = str(mapping.get("base_model_class")) if isinstance(mapping, dict) else None
        for name, value in ranks.items():
            check_int(f"rank_pattern[{name!r}]", value, 1, MAX_RANK)
        for name, value in alphas.items():
            check_alpha(f"alpha_pattern[{name!r}]", value)
    except InvalidInput as error:
        raise error.under(NAME) from None
    return PeftConfig(rank, alpha, use_rslora, ranks, alphas, parameters, modules, excluded, layers, base)


def _names(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    names = raw.get(name) or []
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise InvalidInput(name, value=names, wanted="it must be a list of names")
    return tuple(names)


def _layers(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    layers = raw.get("layers_to_transform")
    if layers is None or layers == []:
        return None
    layers = layers if isinstance(layers, list) else [layers]
    for index, layer in enumerate(layers):
        check_int(f"layers_to_transform[{index}]", layer, 0)
    if raw.get("layers_pattern") not in (None, "", [], *_LISTS, *([each] for each in _LISTS)):
        wanted = "this build reads layers by the first number in a module's name"
        raise Unsupported("layers_pattern", value=raw["layers_pattern"], wanted=wanted)
    return tuple(layers)


def _ends_with(name: str, ends: Collection[str]) -> bool:
    """Returns whether a module has one of the names, as a whole or at its end."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _pattern(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    pattern = raw.get(name) or {}
    if not isinstance(pattern, dict):
        raise InvalidInput(name, value=pattern, wanted="it must be an object")
    for key in pattern:
        # A regular expression of someone else's can run for hours.
        if not _PATTERN.fullmatch(key):
            wanted = "this build reads names of modules, and no other regular expression"
            raise Unsupported(name, f"has {shown(key)}", wanted).under(NAME)
    return pattern


def _of(pattern: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns the value of the first name that a module has, as a whole or at its end."""
    for key, value in pattern.items():
        own = key.removeprefix("^").removeprefix(_ANY_FRONT)
        is_whole = name == own and not key.startswith(_ANY_FRONT)
        if is_whole or (not key.startswith("^") and name.endswith(f".{own}")):
            return value
    return default


def check_alpha(name: str, value: Any) -> None:
    """Refuses a value by which an adapter's products cannot be scaled."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not 0 < abs(value) < 1e6:
        raise InvalidInput(name, value=value, wanted="it must be a number other than 0 and below 1e6")
