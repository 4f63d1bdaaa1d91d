"""Folders of models next to those that they came from: saved again, or with a tensor changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy
import safetensors.torch

from jattn.llm.load import load_model, parse_config, save_model
from jattn.llm.load.folder import read_config

__all__ = ["assert_saved_as_it_was", "write_changed"]


def assert_saved_as_it_was(folder: Path, copy: Path) -> None:
    """Loads `folder`, saves it as `copy`, and compares every tensor's bytes and the config."""
    model, config, _ = load_model(folder, with_tokenizer=False)
    save_model(copy, model, config)
    theirs, ours = (safetensors.numpy.load((each / "model.safetensors").read_bytes()) for each in (folder, copy))
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[name], ours[name]) for name in theirs)
    again = parse_config(read_config(copy))
    assert (again, again.architecture) == (config, config.architecture)


def write_changed(folder: Path, target: Path, tensor: str, factor: float) -> Path:
    """Copies a model's folder to `target`, where row 3 of one of its tensors is `factor` times as large."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = safetensors.torch.load_file(target / "model.safetensors")
    tensors[tensor][3] *= factor
    safetensors.torch.save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target
