"""The text models of Gemma 4 that read pictures and sound without encoders: its layers without experts."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.gemma4 import GEMMA4
from jattn.llm.load.families.gemma4_files import derived_fields, written_keys

#: Parts of Gemma 4 that these models do not have, and the values of their keys where they are switched off.
_WITHOUT = {"enable_moe_block": False, "hidden_size_per_layer_input": 0}

GEMMA4_UNIFIED = replace(
    GEMMA4,
    architecture="Gemma4UnifiedForCausalLM",
    model_type="gemma4_unified_text",
    keys={name: key for name, key in GEMMA4.keys.items() if not str(key).startswith(("moe.", "per_layer_input."))},
    defaults={
        name: value
        for name, value in GEMMA4.all_defaults.items()
        if name in GEMMA4.derived or name in ("hidden_activation", "tie_word_embeddings", "head_dim", "rope_parameters")
    }
    | {"sliding_window": 1024},
    derive=lambda raw: derived_fields({**raw, **_WITHOUT}),
    write=lambda config: {name: value for name, value in written_keys(config).items() if name not in _WITHOUT},
    derived={name: value for name, value in GEMMA4.derived.items() if name not in _WITHOUT},
    inert=_WITHOUT,
    names={name: file for name, file in GEMMA4.names.items() if not name.startswith(("moe.", "per_layer_input"))},
    whole=GEMMA4.whole
    and replace(GEMMA4.whole, architecture="Gemma4UnifiedForConditionalGeneration", model_type="gemma4_unified"),
)
