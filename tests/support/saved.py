"""A model that was loaded and saved again, next to the folder that it came from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy

from jattn.load import load_model, parse_config, save_model
from jattn.load.folder import read_object

__all__ = ["assert_saved_as_it_was"]


def assert_saved_as_it_was(folder: Path, copy: Path) -> None:
    """Loads `folder`, saves it as `copy`, and compares every tensor's bytes and the config."""
    model, config, _ = load_model(folder, with_tokenizer=False)
    save_model(copy, model, config)
    theirs, ours = (safetensors.numpy.load((each / "model.safetensors").read_bytes()) for each in (folder, copy))
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[name], ours[name]) for name in theirs)
    again = parse_config(read_object(copy, "config.json"))
    assert (again, again.architecture) == (config, config.architecture)
