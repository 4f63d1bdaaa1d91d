"""The command line: `jattn generate`, `try`, `serve`, `crosscheck`, `convert`, ...; the only place that prints."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jattn import __version__
from jattn.bench import NAMES as BENCHMARKS
from jattn.bench import load_benchmark
from jattn.compilation_cache import keeping_programs
from jattn.extras import missing_extra
from jattn.llm.arguments import (
    add_cache_argument,
    add_engine_arguments,
    add_loading_arguments,
    add_process_arguments,
    engine_config,
    join_processes,
    loading_options,
    tell_processes,
)
from jattn.llm.paths import check_exists, named_path
from torch_core.base.errors import InvalidInput, JattnError, Unsupported

_MODEL_HELP = "a Hugging Face folder or a GGUF file (default: the embedded model)"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0 fine, 1 a failed comparison, 2 bad arguments or input."""
    given = sys.argv[1:] if argv is None else list(argv)
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # An exception would be lost where JAX is called back by a garbage collection, as most do while it is imported.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser, commands = _parser()
    try:
        if not {"-h", "--help"}.intersection(given):
            _check_model(*parser.parse_known_args(given))
        # Their flags are an engine's fields, for which jax is imported: only if one of them is run.
        if given[:1] in (["generate"], ["chat"]):
            generates = given[0] == "generate"
            sizes = {"max_num_seqs": "one for each prompt, 8 to 64" if generates else 1}
            add_engine_arguments(commands[given[0]], without=["seed"] if generates else [], defaults=sizes)
        arguments, rest = parser.parse_known_args(given)
        if rest and arguments.command not in ("bench", "serve"):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return arguments.run(arguments, rest)
    except JattnError as error:
        print(f"jattn: {error}", file=sys.stderr)
        tell_processes(error)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader closed the pipe (as in `jattn generate | head`); avoid a message at exit too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        tell_processes(error)
        absent = missing_extra(error)
        if absent is None:
            raise
        print(f"jattn: this needs a package more: {absent}", file=sys.stderr)
        return 2


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(prog="jattn", description="Paged attention for JAX and Flax.")
    parser.add_argument("--version", action="version", version=f"jattn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    generate = commands.add_parser("generate", help="generate text from one or more prompts")
    generate.add_argument("--model", metavar="PATH", help=_MODEL_HELP)
    generate.add_argument("--prompt", action="append", metavar="TEXT", help="prompt; may be given several times")
    generate.add_argument("--max-tokens", type=int, default=64, help="tokens to generate for each prompt (64)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (0)")
    generate.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all (0)")
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this probability (1)"
    )
    generate.add_argument("--seed", type=int, default=0, help="seed of the random numbers (0)")
    add_loading_arguments(generate)
    add_process_arguments(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_cache_argument(generate)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to a model in the terminal; /clear forgets, /exit ends")
    chat.add_argument("--model", metavar="PATH", help=_MODEL_HELP)
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument("--chat-template", metavar="FILE", help="template to use instead of the model's own")
    chat.add_argument("--max-tokens", type=int, default=512, help="most tokens of one answer (512)")
    chat.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest token (0.7)")
    add_loading_arguments(chat)
    add_cache_argument(chat)
    chat.set_defaults(run=_chat)

    trial = commands.add_parser("try", help="run a small real model that a pip package carries, or list them")
    trial.add_argument(
        "name", nargs="?", metavar="NAME", help="name in the list (default: the first that is installed)"
    )
    trial.add_argument("--prompt", metavar="TEXT", help="what to ask")
    trial.add_argument("--max-tokens", type=int, default=64, help="most tokens of the answer (64)")
    add_cache_argument(trial)
    trial.set_defaults(run=_try)

    crosscheck = commands.add_parser("crosscheck", help="compare the JAX model with torch, position by position")
    crosscheck.add_argument("--model", metavar="PATH", help=_MODEL_HELP)
    crosscheck.add_argument("--prompt", action="append", metavar="TEXT", help="prompt; may be given several times")
    crosscheck.add_argument("--max-tokens", type=int, default=32, help="greedy tokens to compare (32)")
    crosscheck.add_argument(
        "--layers", action="store_true", help="compare every layer, and name the first that differs"
    )
    crosscheck.add_argument(
        "--bits", action="store_true", help="compare generation with the training pass bit by bit, without torch"
    )
    crosscheck.add_argument("--picture", metavar="FILE", help="draw the error by layer and position (needs matplotlib)")
    crosscheck.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_loading_arguments(crosscheck)
    crosscheck.set_defaults(run=_crosscheck)

    convert = commands.add_parser("convert", help="write a GGUF file as a Hugging Face folder")
    convert.add_argument("model", metavar="FILE.gguf", help="the file; another folder works too")
    convert.add_argument("folder", metavar="DIR", help="the folder to write")
    convert.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the stored weights (that of the file, bfloat16 if it is quantised)",
    )
    convert.set_defaults(run=_convert)

    doctor = commands.add_parser("doctor", help="list the features that work on this machine, and why others do not")
    doctor.set_defaults(run=_doctor)

    serve = commands.add_parser("serve", help="serve OpenAI's HTTP interface; see `jattn serve --help`", add_help=False)
    serve.set_defaults(run=_serve)

    bench = commands.add_parser("bench", help="run a benchmark; see `jattn bench NAME --help`", add_help=False)
    bench.add_argument("name", nargs="?", help=f"one of {', '.join(BENCHMARKS)}")
    bench.set_defaults(run=_bench)
    return parser, commands.choices


def _check_model(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Refuses a missing folder, and says what is loaded: what follows imports for seconds."""
    models = [model] if (model := getattr(arguments, "model", None)) is not None else []
    if arguments.command == "serve":
        models = rest[:1] if rest and not rest[0].startswith("-") else []
        models += [named_path(value)[1] for flag, value in itertools.pairwise(rest) if flag == "--model"]
    for each in models:
        check_exists(each)
    if arguments.command in ("generate", "chat", "serve"):
        names = ", ".join(models) or "the embedded model"
        print(f"jattn: loading {names} ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _compiling(arguments: argparse.Namespace) -> Iterator[None]:
    """Keeps compiled programs for the next run, and says on stderr what is compiled."""
    teller, logger = _Teller(), logging.getLogger("jattn")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(teller)
    try:
        with keeping_programs(not arguments.no_compilation_cache):
            yield
    finally:
        logger.removeHandler(teller)
        logger.setLevel(level)


class _Teller(logging.Handler):
    """Writes a line to stderr for each program that a step waits for."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) == "program_compiling":
            print(f"jattn: compiling {getattr(record, 'program', '')} ...", file=sys.stderr, flush=True)


_DEFAULT_PROMPT = "The for statement is used to"


def _generate(arguments: argparse.Namespace, rest: list[str]) -> int:
    from jattn.llm.engine import LLM, SamplingParams

    join_processes(arguments)
    prompts = arguments.prompt or [_DEFAULT_PROMPT]
    params = [
        SamplingParams(
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            max_tokens=arguments.max_tokens,
            seed=(arguments.seed + index) & 0xFFFFFFFF,
        )
        for index in range(len(prompts))
    ]
    config = engine_config(arguments, max_num_seqs=max(8, min(len(prompts), 64)))
    with _compiling(arguments), LLM(arguments.model, **loading_options(arguments), config=config) as llm:
        if not llm.engine.follow():
            _tell(llm, prompts, params, as_json=arguments.json)
    return 0


def _tell(llm: Any, prompts: list[str], params: list[Any], *, as_json: bool) -> None:
    """Prints a model's answers to some prompts as they are generated, and then the time."""
    started = time.monotonic()
    results: dict[int, Any] = {}
    shown: list[str] = [""] * len(prompts)
    stream = llm.stream(prompts, params)
    peak_blocks = 0
    compiled_before = None
    for delta in stream:
        if compiled_before is None:
            compiled_before = llm.engine.compile_seconds
            # After the lines on stderr about the program of the prompt.
            if not as_json and len(prompts) == 1:
                print(prompts[0], end="", flush=True)
        peak_blocks = max(peak_blocks, llm.engine.cache_stats().used)
        if delta.output is not None:
            results[delta.index] = delta.output
        if as_json:
            continue
        if len(prompts) == 1:
            print(delta.text, end="", flush=True)
        else:
            shown[delta.index] += delta.text
            _print_whole_lines(delta.index, shown, finished=delta.output is not None)
    if not as_json and len(prompts) == 1:
        print()
    outputs = [results[index] for index in range(len(prompts))]
    summary = _summary(outputs, started, peak_blocks, llm, compiled_before or 0.0)
    if as_json:
        print(json.dumps({"outputs": [_as_json(output) for output in outputs], **summary}, indent=2))
    print(
        f"{summary['new_tokens']} tokens from {len(outputs)} prompts; time to first token "
        f"{summary['time_to_first_token_s'] * 1e3:.0f} ms, compiling included; then "
        f"{summary['tokens_per_second']:.0f} tokens/s without it; cache {summary['peak_blocks']} of "
        f"{summary['num_blocks']} blocks ({summary['cache_bytes'] / 2**20:.1f} MiB); "
        f"{summary['programs']} programs compiled in {summary['compile_s']:.1f} s.",
        file=sys.stderr,
    )


def _chat(arguments: argparse.Namespace, rest: list[str]) -> int:
    from jattn.llm.chat import converse
    from jattn.llm.engine import LLM, SamplingParams
    from jattn.llm.load.folder import read_given

    template = None
    if arguments.chat_template is not None:
        template = read_given("chat_template", arguments.chat_template)
    params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    config = engine_config(arguments, max_num_seqs=1)
    with _compiling(arguments), LLM(arguments.model, **loading_options(arguments), config=config) as llm:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            # It ends the answer, and not the process.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        say = functools.partial(print, end="", flush=True)
        converse(llm, _typed(), say, params=params, system=arguments.system, chat_template=template)
    return 0


def _try(arguments: argparse.Namespace, rest: list[str]) -> int:
    from jattn.llm.small_models import SMALL_MODELS, small_model

    model = small_model(arguments.name)
    if model is None:
        print("No small model is installed. `jattn try` runs one of these, which jattn does not install itself:\n")
        for each in SMALL_MODELS:
            print(f"  {each.name:8} {each.about}\n           pip install {each.install}")
        return 0
    path, prompt = model.path(), arguments.prompt or model.prompt
    print(f"jattn: loading {path} ...", file=sys.stderr, flush=True)

    from jattn.llm.chat import converse
    from jattn.llm.engine import LLM, EngineConfig, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)
    with _compiling(arguments), LLM(path, config=EngineConfig(max_num_seqs=1)) as llm:
        if model.task == "embed":
            others = ["Is it raining outside?", "The train was late again.", "A recipe for bread."]
            first, *vectors = (each.outputs.embedding for each in llm.embed([prompt, *others]))
            print(f"Similarity to {prompt!r}:")
            for text, vector in zip(others, vectors, strict=True):
                print(f"  {first @ vector:6.3f}  {text}")
        elif model.task == "chat":
            print(f"> {prompt}")
            converse(llm, [prompt], functools.partial(print, end="", flush=True), params=params)
        else:
            _tell(llm, [prompt], [params], as_json=False)
    command = {"embed": "serve", "chat": "chat --model", "generate": "generate --model"}[model.task]
    print(f"jattn: next: jattn {command} {path}", file=sys.stderr)
    return 0


def _typed() -> Iterator[str]:
    """The lines of stdin, with a prompt and line editing in a terminal."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ")


def _print_whole_lines(index: int, shown: list[str], *, finished: bool) -> None:
    """Streams several prompts at once without mixing them inside a line."""
    *lines, open_line = shown[index].split("\n")
    if finished:
        lines, open_line = [*lines, open_line], ""
    for line in lines:
        print(f"[{index}] {line}", flush=True)
    shown[index] = open_line


def _summary(outputs: list[Any], started: float, peak_blocks: int, llm: Any, compiled_before: float) -> dict[str, Any]:
    """Sums a run up; `compiled_before` is the time spent on compiling before the first token."""
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    first = min(output.metrics.first_token_time for output in outputs)
    last = max(output.metrics.finish_time for output in outputs)
    plan, compile_s = llm.engine.pool_plan, llm.engine.compile_seconds
    return {
        "new_tokens": tokens,
        "time_to_first_token_s": first - started,
        "tokens_per_second": (tokens - len(outputs)) / max(last - first - (compile_s - compiled_before), 1e-9),
        "compile_s": compile_s,
        "peak_blocks": peak_blocks,
        "num_blocks": plan.num_blocks,
        "cache_bytes": plan.num_bytes,
        "programs": len(llm.engine.programs),
    }


def _as_json(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "prompt": output.prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }


def _crosscheck(arguments: argparse.Namespace, rest: list[str]) -> int:
    from jattn.llm.testing import check_picture_path, compare_bits, compare_with_torch, save_picture

    if arguments.bits:
        bits = compare_bits(
            arguments.model, arguments.prompt, max_tokens=arguments.max_tokens, **loading_options(arguments)
        )
        print(bits.to_json() if arguments.json else bits)
        return 0 if bits.passed else 1
    if arguments.picture is not None:
        check_picture_path(arguments.picture)
    options = loading_options(arguments)
    implementation = options.pop("implementation")
    report = compare_with_torch(
        arguments.model,
        arguments.prompt,
        implementations=None if implementation is None else (implementation,),
        max_tokens=arguments.max_tokens,
        layers=arguments.layers or arguments.picture is not None,
        **options,
    )
    print(report.to_json() if arguments.json else report)
    if arguments.picture is not None:
        save_picture(report, arguments.picture)
    return 0 if report.passed else 1


def _convert(arguments: argparse.Namespace, rest: list[str]) -> int:
    from jattn.llm.load import convert_model

    convert_model(arguments.model, arguments.folder, dtype=arguments.dtype, progress=sys.stderr.isatty())
    return 0


def _doctor(arguments: argparse.Namespace, rest: list[str]) -> int:
    from jattn.doctor import collect

    print(collect())
    return 0


def _serve(arguments: argparse.Namespace, rest: list[str]) -> int:
    try:
        from jattn.llm.serve.server import main as serve
    except ImportError as error:
        raise Unsupported(f"serving needs {error.name}, which is not installed; pip install 'jattn[serve]'.") from None
    with keeping_programs("--no-compilation-cache" not in rest):
        return serve(rest)


def _bench(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.name in (None, "-h", "--help"):
        print(f"usage: jattn bench {{{','.join(BENCHMARKS)}}} [options]; see `jattn bench NAME --help`")
        return 0
    if arguments.name not in BENCHMARKS:
        raise InvalidInput("bench", f"{arguments.name!r} does not exist", f"use one of {', '.join(BENCHMARKS)}")
    from jattn.bench.runner import main as run_benchmark

    return run_benchmark(load_benchmark(arguments.name), rest)
