"""Models that score texts by labels, and what sentence-transformers writes of its cross-encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jattn.llm.load.families.family import Family, Key
from torch_core.base.errors import InvalidInput, Unsupported

#: Of sentence-transformers' cross-encoders: the function that makes a score of a logit.
_ACTIVATIONS = {"torch.nn.modules.activation.Sigmoid": "sigmoid", "torch.nn.modules.linear.Identity": "identity"}
_WRITTEN = {kind: name for name, kind in _ACTIVATIONS.items()}


def _read_activation(given: Any) -> str:
    name = given.get("activation_fn") if isinstance(given, Mapping) else given
    if name not in (None, *_ACTIVATIONS):
        wanted = f"this build has {', '.join(_ACTIVATIONS)}"
        raise Unsupported("activation_fn", value=name, wanted=wanted)
    return "sigmoid" if name is None else _ACTIVATIONS[name]


def _count(given: Any) -> int:
    if not isinstance(given, Mapping):
        raise InvalidInput("id2label", value=given, wanted="it must be an object")
    return len(given)


def with_labels(family: Family, architecture: str, pooler: str, classifier: str) -> Family:
    """Returns the family of a model with labels, which has two more layers of these names."""
    names = Key("num_labels", _count, lambda count: {str(label): f"LABEL_{label}" for label in range(count)})
    older = Key("label_activation", _read_activation, _WRITTEN.__getitem__)
    newer = Key("label_activation", _read_activation, lambda kind: {"activation_fn": _WRITTEN[kind]})
    return replace(
        family,
        architecture=architecture,
        keys={
            **family.keys,
            "id2label": names,
            "sbert_ce_default_activation_function": older,
            "sentence_transformers": newer,
        },
        defaults={**family.all_defaults, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}},
        also=(),
        names={**family.names, "pooler": pooler, "classifier": classifier},
        unread=r".*position_ids",
    )
