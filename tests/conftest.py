"""What every test shares: the seed of a test comes from its name, and a failing test prints it."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

# Before torch is imported: several workers share the cores, and threads that wait for each other there cost a fifth.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before JAX starts its CPU backend, in this process and those that tests start: XLA's newer emitters go through MLIR,
# which is half of the time in which a small program compiles; parts for threads are a fifth of the rest. Flags of one's
# own bring them back, as in .ci/run. XLA ends the process at a flag that it does not know, and knows these up to jaxlib
# 0.11.0.
if tuple(map(int, metadata.version("jaxlib").split(".")[:3])) <= (0, 11, 0):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1")
# Programs compile in a fifth of the time. .ci/run has optimised ones, too, as users have. On a GPU all are: the bits of
# its kernels are compared with torch's.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# The command line keeps compiled programs in the user's cache folder.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jattn-tests-")
# A GPU would round float32 products to TF32, and what tests may differ by is float32's.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

import jax
import pytest

atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# Their assertions are tests': they hold under python -O too, and say what they compared.
pytest.register_assert_rewrite("tests.support")
# Tracing makes many objects that live long; to look through all of them as often as usual takes a tenth of the time.
gc.set_threshold(50_000, 20, 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps each folder's tests together, in whatever order they come: they share what they compile."""
    place: dict[Path, int] = {}
    for index, item in enumerate(items):
        place.setdefault(item.path.parent, index)
    items.sort(key=lambda item: place[item.path.parent])


def pytest_collection_finish() -> None:
    """Hides modules and tests from the collector: each engine that sizes its pool collects all garbage first."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def kept() -> Iterator[None]:
    """Hides what a file's tests leave, such as compiled programs, from the collector as well."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that depends on the test's full name only: the same in any order and on any machine."""
    value = zlib.adler32(request.node.nodeid.encode())
    print(f"seed of {request.node.nodeid}: {value}")
    return value


@pytest.fixture
def on_cpu() -> None:
    """For tests of what holds, or is chosen, on a CPU alone."""
    if jax.default_backend() != "cpu":
        pytest.skip("about a CPU")
