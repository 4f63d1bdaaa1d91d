"""The table of all architectures in docs/reference/architectures.md, from the families' data."""

from __future__ import annotations

from jattn.llm.load.families.family import Family
from jattn.llm.load.families.registry import known_families


def families_table() -> str:
    """Returns the table in Markdown, a row for each architecture in the order of their names."""
    head = ["architecture", "`model_type`", "layers", "language model of", "GGUF"]
    families = sorted(known_families().values(), key=lambda family: family.architecture.lower())
    rows = [head, ["---"] * len(head), *map(_row, families)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(family: Family) -> list[str]:
    types = ", ".join(f"`{name}`" for name in (family.model_type, *family.also_types))
    whole = f"`{family.whole.architecture}`" if family.whole is not None else ""
    gguf = f"`{family.gguf.architecture}`" if family.gguf is not None else ""
    return [f"`{family.architecture}`", types, ", ".join(_layers(family)), whole, gguf]


def _layers(family: Family) -> list[str]:
    """Returns what layers of the family may have beside full attention over keys and values of each head."""
    fields = {name for key in family.all_keys.values() for name in key.fields} | {*family.options}
    states = sorted({kind for kind in family.layer_types.values() if kind != "attention"})
    has = {
        "encoder": family.options.get("is_encoder") or any(name.startswith("encoder.") for name in fields),
        "windows": family.windows is not None,
        "chunks": "attention_chunk_size" in fields,
        "latents": "latent.kv_lora_rank" in fields,
        "an indexer": "latent.index_topk" in fields,
        "experts": family.has_experts,
    }
    return [name for name, is_there in has.items() if is_there] + [f"`{kind}`" for kind in states]
