"""The speed of saving and loading a model, next to that of reading its file."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
from flax import nnx

from jattn.bench.runner import Benchmark
from jattn.bench.shapes import SHAPES, random_decoder
from jattn.llm.load import load_model, save_model
from jattn.llm.models import ModelConfig

_CHUNK = 16 << 20
_READERS = 8


@dataclass(frozen=True, slots=True)
class LoadRow:
    """Seconds of one action, the file's gigabytes per second, and the most host memory until then in GiB."""

    action: str
    seconds: float
    gigabytes_per_second: float
    peak_gib: float


def run(
    *, shape: Literal["70b", "8b", "tiny"] = "8b", layers: int | None = None, folder: Path | None = None
) -> Iterator[LoadRow]:
    """Writes a random model and yields a row for saving it, for reading its file and for loading it.

    Eight threads read the file. "From disk" drops it from the page cache first, if the system lets it.

    Args:
        shape: shape of the model.
        layers: number of layers of the model; those of the shape by default.
        folder: folder on the disk to measure; a temporary one by default.
    """
    config = SHAPES[shape]
    config = config if layers is None else replace(config, num_hidden_layers=layers)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        path = place / "model.safetensors"
        seconds = _save(place, config)
        size = path.stat().st_size / 1e9
        yield _row("save", seconds, size)
        for source in ("from disk", "from the page cache"):
            for action, work in (("read", lambda: _read(path)), ("load", lambda: _load(place))):
                if source == "from disk":
                    _drop(path)
                yield _row(f"{action} {source}", _seconds(work), size)


def _row(action: str, seconds: float, gigabytes: float) -> LoadRow:
    return LoadRow(action, seconds, gigabytes / seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def _save(folder: Path, config: ModelConfig) -> float:
    model = random_decoder(config)
    jax.block_until_ready(nnx.state(model))
    return _seconds(lambda: save_model(folder, model, config))


def _seconds(action: Callable[[], object]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def _load(folder: Path) -> None:
    model, *_ = load_model(folder, with_tokenizer=False)
    jax.block_until_ready(nnx.state(model))


def _drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path) -> None:
    with path.open("rb") as file, ThreadPoolExecutor(_READERS) as threads:
        size = path.stat().st_size

        def work(number: int) -> None:
            buffer = bytearray(_CHUNK)
            for start in range(number * _CHUNK, size, _READERS * _CHUNK):
                os.preadv(file.fileno(), [buffer], start)

        list(threads.map(work, range(_READERS)))


BENCHMARK = Benchmark("load", __doc__, run)
