"""RoBERTa (arXiv:1907.11692) and XLM-RoBERTa (arXiv:1911.02116): BERT with other positions and names."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.bert import BERT
from jattn.llm.load.families.family import Key
from jattn.llm.load.families.labels import with_labels


def _in_roberta(name: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Returns BERT's name of a tensor as RoBERTa has it."""
    return name.replace("bert.", "roberta.", 1) if isinstance(name, str) else name


# The table of positions has the row of padding, and one before it.
_OFFSET = 2
ROBERTA = replace(
    BERT,
    architecture="RobertaModel",
    model_type="roberta",
    keys={
        **BERT.keys,
        "max_position_embeddings": Key(
            "max_position_embeddings",
            lambda rows: rows - _OFFSET if isinstance(rows, int) else rows,
            lambda length: length + _OFFSET,
        ),
    },
    defaults={**BERT.all_defaults, "max_position_embeddings": 512},
    options={**BERT.options, "position_offset": _OFFSET},
    inert={**BERT.inert, "pad_token_id": 1},
    also=("RobertaForMaskedLM",),
    names={module: _in_roberta(name) for module, name in BERT.names.items()},
    prefix="roberta.",
    unread=r"(roberta\.)?(pooler|lm_head)\..+|.*position_ids",
)
XLM_ROBERTA = replace(
    ROBERTA, architecture="XLMRobertaModel", model_type="xlm-roberta", also=("XLMRobertaForMaskedLM",)
)
_ROBERTA_HEAD = ("classifier.dense", "classifier.out_proj")
ROBERTA_CLASSIFIER = with_labels(ROBERTA, "RobertaForSequenceClassification", *_ROBERTA_HEAD)
XLM_ROBERTA_CLASSIFIER = with_labels(XLM_ROBERTA, "XLMRobertaForSequenceClassification", *_ROBERTA_HEAD)
