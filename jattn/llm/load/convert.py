"""convert_model: a model in one file to a Hugging Face folder."""

from __future__ import annotations

import os

from jattn.llm.load.model import load_model
from jattn.llm.load.save import save_model
from jattn.llm.load.source import open_source


def convert_model(
    model: str | os.PathLike[str], folder: str | os.PathLike[str], *, dtype: str | None = None, progress: bool = False
) -> None:
    """Writes the config, weights, tokenizer and generation defaults of a model as a Hugging Face folder.

    Args:
        model: a GGUF file, or another folder, such as one with FP8 weights.
        folder: the folder to write; see `save_model`.
        dtype: dtype of the stored weights; None for that of the model's matrices, or bfloat16 if they are quantised.
            float32 keeps every bit of quantised ones.
        progress: show a bar on stderr.

    Raises:
        InvalidInput: the model is broken, or the dtype is not float32, bfloat16 or float16.
        Unsupported: this build does not read the model.
    """
    source = open_source(model)
    dtype = source.parse(source.raw_config()).dtype if dtype is None else dtype
    loaded, config, tokenizer = load_model(model, dtype=dtype, progress=progress)
    save_model(folder, loaded, config, tokenizer, defaults=source.generation_defaults())
