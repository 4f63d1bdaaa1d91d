"""`jattn bench load`: what loading and saving a model take beside reading its file."""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax
from flax import nnx

from jattn.bench.engine import SHAPES, random_decoder
from jattn.llm.load import load_model, save_model
from jattn.llm.models import ModelConfig

__all__ = ["main", "measure_rows"]

_CHUNK = 16 << 20
_READERS = 8
_WIDTH = 26


def main(argv: Sequence[str]) -> None:
    """Writes a random model and prints gigabytes a second of saving it, of reading the file and of loading it."""
    parser = argparse.ArgumentParser(prog="jattn bench load", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="of the model; those of the shape by default")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one by default")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print("way".ljust(_WIDTH) + "s".rjust(8) + "GB/s".rjust(8), flush=True)
        for name, seconds, rate in measure_rows(Path(folder), options.shape, num_layers=options.layers):
            print(f"{name:{_WIDTH}}{seconds:8.2f}{rate:8.2f}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.shape}, {peak:.1f} GiB of host memory at most"
    )


def measure_rows(folder: Path, shape: str, *, num_layers: int | None = None) -> Iterator[tuple[str, float, float]]:
    """Yields rows of what was done, the seconds and the gigabytes a second.

    Files are read by eight threads. "From disk" drops them from the page cache first, where the system lets it.

    Args:
        folder: to write to.
        shape: one of `SHAPES` of `jattn bench engine`.
        num_layers: of the model; those of the shape if None.
    """
    config = SHAPES[shape]
    config = config if num_layers is None else replace(config, num_hidden_layers=num_layers)
    path = folder / "model.safetensors"
    seconds = _save(folder, config)
    size = path.stat().st_size / 1e9
    yield "save", seconds, size / seconds
    for place in ("from disk", "from the page cache"):
        for name, action in (("read", lambda: _read(path)), ("load", lambda: _load(folder))):
            if place == "from disk":
                _drop(path)
            seconds = _seconds(action)
            yield f"{name} {place}", seconds, size / seconds


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
    with path.open("rb") as file:
        starts, lock = iter(range(0, path.stat().st_size, _CHUNK)), threading.Lock()

        def work() -> None:
            buffer = bytearray(_CHUNK)
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                os.preadv(file.fileno(), [buffer], start)

        threads = [threading.Thread(target=work) for _ in range(_READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
