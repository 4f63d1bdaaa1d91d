"""The processes for texts: bounds, refusals, and that none of them outlives its owner."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jattn.llm.workers import child, pool
from jattn.llm.workers.pool import Refused, Task, end_idle_processes
from torch_core.base.errors import InvalidInput, Overloaded

RENDER = Task(
    module="templates",
    function="render_template",
    argument="messages",
    subject="the chat template",
    fix="shorten it",
    seconds=2.0,
    memory_bytes=256 << 20,
)
ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"


def processes() -> list[Any]:
    return list(pool._lanes_of(pool.os.getpid())["templates"]._idle.queue)


@pytest.fixture(autouse=True)
def no_idle_processes():
    end_idle_processes()
    yield
    end_idle_processes()


def test_a_process_is_used_again_and_ended_by_its_owner() -> None:
    texts = [RENDER.run("{{ x }}", [], {"x": index}) for index in range(3)]
    (process,) = processes()

    end_idle_processes()

    assert texts == [b"0", b"1", b"2"]
    assert not process.alive
    assert RENDER.run("again", [], {}) == b"again"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ENDLESS, r"^the chat template takes more than 0\.1 s of processor time; shorten it\.$"),
        ("{{ 'x' * 99999999 }}", r"^the chat template takes more than 32 MiB of memory, or .*; shorten it\.$"),
    ],
)
def test_a_process_that_meets_a_bound_is_replaced(source, message) -> None:
    RENDER.run("", [], {})
    (process,) = processes()

    with pytest.raises(InvalidInput, match=message) as error:
        replace(RENDER, seconds=0.1, memory_bytes=32 << 20).run(source, [], {})

    assert error.value.argument == "messages"
    assert not process.alive
    assert RENDER.run("again", [], {}) == b"again"


def test_a_refusal_leaves_the_process_as_it_was() -> None:
    RENDER.run("", [], {})
    (process,) = processes()

    with pytest.raises(Refused, match=r"^TemplateError: why$"):
        RENDER.run("{{ raise_exception('why') }}", [], {})

    assert processes() == [process]


def test_the_bounds_of_a_task_end_with_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)

    with child._bounds(60.0, 1 << 40):
        assert resource.getrlimit(resource.RLIMIT_DATA) != before

    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_without_a_systems_limits_the_clock_ends_the_work(monkeypatch) -> None:
    monkeypatch.setattr(pool, "_CLOCK_PER_SECOND", 1 / 30)

    with pytest.raises(InvalidInput, match=r"processor time"):
        replace(RENDER, seconds=9.0).run(ENDLESS, [], {})

    assert processes() == []


def test_a_process_that_was_killed_while_idle_is_replaced() -> None:
    RENDER.run("", [], {})
    (process,) = processes()
    process._process.kill()
    process._process.wait()

    assert RENDER.run("again", [], {}) == b"again"


def test_a_caller_that_no_process_becomes_free_for_is_told_to_try_again(monkeypatch) -> None:
    monkeypatch.setattr(pool, "_WAIT_SECONDS", 0.0)
    lane = pool._lanes_of(pool.os.getpid())["templates"]

    with lane.process(), lane.process(), pytest.raises(Overloaded, match=r"2 processes are busy, .* try again\.$"):
        RENDER.run("", [], {})

    assert RENDER.run("again", [], {}) == b"again"


def test_an_interrupt_ends_the_work(monkeypatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    RENDER.run("", [], {})
    (process,) = processes()
    process._answers = type("Answers", (), {"get": interrupt})()

    with pytest.raises(KeyboardInterrupt):
        RENDER.run("x", [], {})

    assert not process.alive
    assert RENDER.run("again", [], {}) == b"again"


@pytest.mark.parametrize("value", [object(), {"x": {1, 2}}, b"bytes"], ids=["object", "set", "bytes"])
def test_a_value_that_json_cannot_spell_is_refused(value) -> None:
    with pytest.raises(InvalidInput, match=r"^the chat template takes values that JSON can spell: a \w+ is none\.$"):
        RENDER.run("x", [], {"x": value})


def test_threads_share_the_processes() -> None:
    texts: list[bytes] = []
    threads = [
        threading.Thread(target=lambda index=index: texts.append(RENDER.run("{{ x }}", [], {"x": index})))
        for index in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(texts) == [str(index).encode() for index in range(8)]
    assert 1 <= len(processes()) <= 2


def test_the_exit_of_a_script_without_a_main_guard_ends_its_processes() -> None:
    script = (
        "from jattn.llm.workers import pool; import sys\n"
        "task = pool.Task(module='templates', function='render_template', argument='messages', subject='the template',"
        " fix='shorten it', seconds=2.0, memory_bytes=1 << 28)\n"
        "text = task.run('{{ messages[0] }}', ['hello'], {}).decode()\n"
        "(process,) = pool._lanes_of(pool.os.getpid())['templates']._idle.queue\n"
        "sys.stdout.write(f'{text} {process._process.pid}')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    text, pid = ended.stdout.split()

    assert text == "hello"
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_loads_neither_jax_nor_torch() -> None:
    RENDER.run("", [], {})
    (process,) = processes()
    maps = Path(f"/proc/{process._process.pid}/maps")
    if not maps.exists():
        pytest.skip("this system has no /proc")

    assert not [name for name in ("jaxlib", "libtorch", "_multiarray") if name in maps.read_text()]
