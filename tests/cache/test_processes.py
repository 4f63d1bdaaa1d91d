"""Determinism over hash seeds, many threads on one manager, and the refusal of a forked process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading

import pytest

from tests.cache.driver import Driver, draw_config
from tests.cache.model import Model
from torch_core.base.errors import JattnError, OutOfBlocks, Unsupported
from torch_core.cache import CacheConfig, CacheManager

TRACE = """
import hashlib, random
from torch_core.cache import CacheConfig, CacheManager
from torch_core.base.errors import OutOfBlocks

source = random.Random(7)
cache = CacheManager(CacheConfig(num_blocks=24, block_size=2, sliding_window=8, num_host_blocks=8))
names, made, digest = [], 0, hashlib.sha256()
for move in range(600):
    if len(names) < 4:
        made += 1
        names.append(f"s{made}")
        cache.add(names[-1], [source.randrange(2) for _ in range(9)], salt=b"t")
    try:
        step = cache.step([(name, 1 + source.randrange(3)) for name in names])
        digest.update(repr((step.rows, step.copies)).encode())
        cache.retire(step.step_id)
    except OutOfBlocks:
        cache.finish(names.pop(0))
    if move % 7 == 0:
        made += 1
        cache.fork(names[-1], f"s{made}")
        names.append(f"s{made}")
        cache.finish(names.pop(0))
print(digest.hexdigest(), cache.stats())
"""


def test_equal_traces_give_equal_ids_under_three_hash_seeds():
    results = {
        subprocess.run(
            [sys.executable, "-c", TRACE],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "random")
    }
    assert len(results) == 1
    assert " evictions=0" not in results.pop()


def test_two_models_driven_alike_end_in_equal_statistics(seed):
    def run():
        import random

        source = random.Random(seed).random
        driver = Driver(Model(draw_config(lambda most: int(source() * (most + 1)))))
        for _ in range(200):
            driver.move(lambda most: int(source() * (most + 1)))
        return driver.model.cache.stats()

    assert run() == run()


def test_eight_threads_take_500_steps_each_and_nothing_leaks():
    cache = CacheManager(CacheConfig(num_blocks=64, block_size=4))
    failures: list[BaseException] = []
    taken = [0] * 8

    def work(number: int) -> None:
        try:
            while taken[number] < 500:
                name = f"t{number}-{taken[number]}"
                cache.add(name, [1, 2, 3, 4, number, 5])
                for _ in range(4):
                    try:
                        step = cache.step([(name, 3)])
                    except OutOfBlocks:
                        continue
                    cache.append_tokens(name, [number])
                    cache.retire(step.step_id)
                    taken[number] += 1
                cache.audit()
                cache.finish(name)
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert min(taken) >= 500
    cache.audit()
    stats = cache.stats()
    assert (stats.used, stats.deferred, stats.num_sequences, stats.steps) == (0, 0, 0, sum(taken))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
def test_a_forked_process_is_refused_even_if_the_lock_was_held(monkeypatch):
    cache = CacheManager(CacheConfig(num_blocks=4, block_size=4))
    with cache._lock:
        # What a child sees: another process id, and a lock that a thread of the parent holds.
        monkeypatch.setattr(os, "getpid", lambda: 4242)
        refusals = []

        def call() -> None:
            for verb in (lambda: cache.add("a", [1]), lambda: cache.plan([]), cache.stats, cache.audit, cache.reset):
                try:
                    verb()
                except JattnError as error:
                    refusals.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join(10)
    assert len(refusals) == 5
    assert all(isinstance(error, Unsupported) for error in refusals)
    assert "must not use it, because both would hand out the same blocks" in str(refusals[0])
    assert "Start workers with the 'spawn' method." in str(refusals[0])


FORK = """
import os
from torch_core.cache import CacheConfig, CacheManager
from torch_core.base.errors import Unsupported

cache = CacheManager(CacheConfig(num_blocks=4, block_size=4))
child = os.fork()
if child == 0:
    try:
        cache.add("a", [1])
    except Unsupported:
        os._exit(17)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_real_fork_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "17"


def test_the_package_needs_nothing_but_the_standard_library():
    code = "import sys, torch_core.cache; print(sorted({'torch', 'numpy', 'jax', 'triton'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
