"""Many streams at once over loopback: `python -m tests.serve.streams [--streams N] [--seconds S]`.

`jattn serve` runs in a process of its own with the embedded model; each of the clients asks again as soon as its stream
has ended, and every answer is compared with the one that its prompt got alone. Exits 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
_PROMPTS = [f"The {word} statement is used" for word in ("for", "while", "with", "try", "if", "del", "import", "yield")]
# Few programs to compile, all before the first request.
_SIZES = ("--max-num-seqs", "32", "--max-num-batched-tokens", "64", "--max-model-len", "64")
_SETTINGS = (*_SIZES, "--no-access-log", "--warmup-first")
_MIB = 1 << 20
_SAMPLES = 30


@dataclass(slots=True)
class Report:
    """What came of it.

    Attributes:
        answers: streams that ended.
        tokens: in them.
        errors: what went wrong, each once.
        unfinished, kv_cache_usage, programs: the server's, at the end; programs that were compiled meanwhile.
        resident_mib: of the server, sampled through the run.
        mib_per_minute: slope of its second half.
    """

    answers: int = 0
    tokens: int = 0
    errors: set[str] = field(default_factory=set)
    unfinished: float = 0
    kv_cache_usage: float = 0
    programs: float = 0
    resident_mib: list[float] = field(default_factory=list)
    mib_per_minute: float = 0


def run(num_streams: int, seconds: float, settings: Sequence[str] = _SETTINGS) -> Report:
    """Holds so many streams open for so long against a server of its own."""
    report = Report()
    with _server(settings) as (process, url):
        expected = {prompt: asyncio.run(_ask(url, prompt)) for prompt in _PROMPTS}
        before = _metrics(url)
        asyncio.run(_hold(url, process.pid, expected, num_streams, seconds, report))
        after = _metrics(url)
        report.unfinished, report.kv_cache_usage = after["jattn_unfinished_samples"], after["jattn_kv_cache_usage"]
        report.programs = after["jattn_programs_total"] - before["jattn_programs_total"]
    half = report.resident_mib[len(report.resident_mib) // 2 :]
    report.mib_per_minute = round(float(np.polyfit(range(len(half)), half, 1)[0]) * _SAMPLES * 60 / seconds, 2)
    return report


@contextlib.contextmanager
def _server(settings: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "jattn", "serve", "--port", "0", *settings],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        yield process, next(found.group() for line in process.stderr if (found := re.search(r"http://[0-9.:]+", line)))
    finally:
        process.terminate()
        process.communicate()


async def _hold(
    url: str, pid: int, expected: dict[str, tuple[str, int]], num_streams: int, seconds: float, report: Report
) -> None:
    end = time.monotonic() + seconds

    async def client(index: int) -> None:
        while time.monotonic() < end:
            prompt = _PROMPTS[index % len(_PROMPTS)]
            index += 1
            try:
                answer = await _ask(url, prompt)
            except Exception as error:
                report.errors.add(f"{type(error).__name__}: {error}")
                continue
            report.answers += 1
            report.tokens += answer[1]
            if answer != expected[prompt]:
                report.errors.add(f"{prompt!r} got {answer}, alone {expected[prompt]}")

    async def watch() -> None:
        while time.monotonic() < end:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            report.resident_mib.append(round(pages * os.sysconf("SC_PAGE_SIZE") / _MIB, 1))
            await asyncio.sleep(seconds / _SAMPLES)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch())
        for index in range(num_streams):
            tasks.create_task(client(index))


async def _ask(url: str, prompt: str) -> tuple[str, int]:
    """Returns the text of one stream and its number of tokens; plain sockets, so that clients cost little."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 24, "temperature": 0}
        body = json.dumps({"prompt": prompt, **options}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        whole = (await reader.read()).decode()
    finally:
        writer.close()
    events = re.findall(r"^data: (.*?)\r?$", whole, re.MULTILINE)
    if not whole.startswith("HTTP/1.1 200 ") or events[-1:] != ["[DONE]"]:
        raise ConnectionError(whole[:200])
    parts: list[dict[str, Any]] = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["text"] for part in parts for choice in part["choices"])
    return text, parts[-1]["usage"]["completion_tokens"]


def _metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return {
        name.partition("{")[0]: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")
    }


def main() -> int:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    report = run(arguments.streams, arguments.seconds)
    print(json.dumps(asdict(report), indent=None, default=sorted))
    return int(bool(report.errors or report.unfinished or report.kv_cache_usage or report.programs))


if __name__ == "__main__":
    sys.exit(main())
