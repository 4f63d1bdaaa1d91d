"""`jattn serve`: models behind OpenAI's HTTP interface; SIGTERM lets running requests finish."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import logging
import socket
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import jax
import uvicorn

from jattn.llm.arguments import (
    add_cache_argument,
    add_engine_arguments,
    add_loading_arguments,
    add_process_arguments,
    engine_config,
    join_processes,
    loading_options,
)
from jattn.llm.engine import LLM, LoRARequest
from jattn.llm.engine.options.defaults import LARGE_DEVICE_BYTES, LARGE_DEVICE_SIZES, SERVING_SIZES, serving_sizes
from jattn.llm.load import ChatTemplate, embedded_model_folder
from jattn.llm.load.folder import read_given, read_json
from jattn.llm.paths import is_gguf, named_path
from jattn.llm.serve import access
from jattn.llm.serve.app import create_app
from jattn.llm.serve.async_llm import AsyncLLM
from jattn.llm.serve.config import ServeConfig
from jattn.llm.serve.connection import TimeLimits, uvicorn_options
from jattn.llm.serve.keys import read_keys
from jattn.llm.tools.formats import REASONING_PARSERS, TOOL_PARSERS
from torch_core.base.checks import check_int, shown
from torch_core.base.errors import InvalidInput, Unsupported

_TIME_LIMITS = {
    "head_seconds": "longest time for the head of a request",
    "body_seconds": "longest time for its body",
    "idle_seconds": "longest time between an answer and the next request of a connection",
    "unread_seconds": "longest time in which a client reads nothing of an answer that waits for it",
}

# Keys of an adapter on the command line, vLLM's.
_OF_ADAPTER = ("name", "path", "base_model_name")


def main(argv: Sequence[str]) -> int:
    """Serves until a signal; returns 0."""
    parser = argparse.ArgumentParser(prog="jattn serve", description=__doc__)
    add, add_flag = parser.add_argument, functools.partial(parser.add_argument, action="store_true")
    add("model", nargs="?", help="a Hugging Face folder or a GGUF file (default: the embedded model)")
    more = "a model under a name that requests choose; may be given several times, and instead of the first argument"
    add("--model", dest="named", action="append", default=[], metavar="NAME=PATH", help=more)
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=8000, help="port to listen on; 0 for any free port (8000)")
    add("--served-model-name", help="name of the model in requests (default: that of the folder or file)")
    form = "file with one key per line, of which clients must send one, and after a space its tenant's name (on all "
    add("--api-key-file", metavar="FILE", help=f"{form}lines or on none); # starts a comment")
    add_flag("--isolate-tenants", help="share cached prefixes only within a tenant (without names: within a key)")
    add("--chat-template", metavar="FILE", help="template to use instead of the model's own")
    add_flag("--trust-request-chat-template", help="accept chat_template from requests; it runs in the sandbox")
    add("--tool-call-parser", choices=TOOL_PARSERS, default="auto", help="format of the model's calls (auto)")
    add("--reasoning-parser", choices=REASONING_PARSERS, default="auto", help="format of its reasoning (auto)")
    add_flag("--tool-instruction", help="describe tools in the system message if the template leaves them out")
    add_flag("--matryoshka", help="serve dimensions of embeddings: the model was trained for shorter vectors")
    about = "adapters over the first model, by the names that requests choose"
    add("--lora-modules", nargs="+", metavar="NAME=FOLDER|JSON", default=[], help=about)
    add_flag("--allow-runtime-lora-updating", help="requests may load adapters from folders here, and unload them")
    add_flag("--no-access-log", help="do not write a line of JSON to stdout for each request")
    add_flag("--ignore-generation-config", help="use OpenAI's defaults of sampling, not the folder's")
    add("--max-body-bytes", type=int, default=4 << 20, help="largest body of a request (4 MiB)")
    add("--max-unfinished", type=int, default=1024, help="most samples that wait or run (1024)")
    for name, meaning in _TIME_LIMITS.items():
        default = getattr(TimeLimits(), name)
        add(f"--{name.replace('_', '-')}", type=float, default=default, help=f"{meaning} ({default:g})")
    add("--drain-seconds", type=int, default=60, help="seconds for running requests to finish after a signal (60)")
    add_loading_arguments(parser)
    warmup = parser.add_mutually_exclusive_group().add_argument
    warmup("--no-warmup", action="store_true", help="compile each program when a request first needs it")
    warmup("--warmup-first", action="store_true", help="listen only when every program is compiled")
    add_cache_argument(parser)
    large = f"where JAX may use {LARGE_DEVICE_BYTES >> 30} GiB of a GPU"
    sizes = {name: f"{size}; {LARGE_DEVICE_SIZES[name]} {large}" for name, size in SERVING_SIZES.items()}
    add_engine_arguments(parser, defaults=sizes)
    add_process_arguments(parser)
    arguments = parser.parse_args(argv)
    join_processes(arguments)
    check_int("drain_seconds", arguments.drain_seconds, 0)
    if not jax.process_index():
        _check_address(arguments.host, arguments.port)
    keys = () if arguments.api_key_file is None else read_keys(arguments.api_key_file)
    template = None
    if arguments.chat_template is not None:
        template = read_given("chat_template", arguments.chat_template)
        ChatTemplate(template)  # Refused before anything is loaded.
    folders = _folders(arguments)
    named_alike = ServeConfig.__dataclass_fields__.keys() & vars(arguments).keys()
    given: dict[str, Any] = {name: getattr(arguments, name) for name in named_alike}
    limits = TimeLimits(**{name: getattr(arguments, name) for name in _TIME_LIMITS})
    given |= {"model_name": next(iter(folders)), "api_keys": keys, "time_limits": limits, "chat_template": template}
    config = ServeConfig(**given)
    engine = engine_config(arguments, **serving_sizes())
    if arguments.lora_modules and not engine.enable_lora:
        raise InvalidInput("lora_modules", "is given", "it needs --enable-lora")
    loras = _loras(arguments.lora_modules, folders)
    # The host also writes a stream for each sequence, for a model of any size.
    engine = dataclasses.replace(engine, num_scheduler_steps=engine.most_scheduler_steps)
    options: dict[str, Any] = {"config": engine, "use_generation_config": not arguments.ignore_generation_config}
    llms = {name: LLM(folder, **loading_options(arguments), **options) for name, folder in folders.items()}
    first = next(iter(llms.values()))
    if first.generates and first.engine.follow():
        return 0
    for lora in loras:
        first.engine.add_lora(lora)
    for name, llm in llms.items():
        if llm.generates and not arguments.no_warmup:
            tell = functools.partial(_tell_progress, llm, f"{name}: " if len(llms) > 1 else "")
            llm.engine.warmup(tell, background=not arguments.warmup_first)
    if not arguments.no_access_log:
        # A separate stream, with lines of JSON only.
        access.log.addHandler(logging.StreamHandler(sys.stdout))
        access.log.setLevel(logging.INFO)
    # See `LLM` on garbage collections.
    gc.collect()
    gc.freeze()
    # uvicorn stops listening at SIGTERM and SIGINT, and waits for running answers.
    llm, *others = (AsyncLLM(llm) for llm in llms.values())
    uvicorn.run(
        create_app(llm, config, dict(zip(list(llms)[1:], others, strict=True))),
        host=arguments.host,
        port=arguments.port,
        timeout_graceful_shutdown=arguments.drain_seconds,
        **uvicorn_options(config.time_limits),
    )
    return 0


def _tell_progress(llm: LLM, model: str, done: int, total: int, name: str) -> None:
    """Writes how many programs are compiled: each one until the server is ready, and then every tenth."""
    if not llm.engine.is_ready or done in (1, total) or done % 10 == 0:
        state = "" if llm.engine.is_ready else "; not ready for all requests yet"
        sys.stderr.write(f"jattn: {model}compiled {done} of {total} programs ({name}){state}\n")


def _folders(arguments: argparse.Namespace) -> dict[str, Path]:
    """Returns the paths of the models by the names in requests, the first argument's before the others."""
    found: dict[str, Path] = {}
    if arguments.model is not None or not arguments.named:
        folder = embedded_model_folder() if arguments.model is None else Path(arguments.model)
        found[arguments.served_model_name or ("jattn" if arguments.model is None else _name_of(folder))] = folder
    elif arguments.served_model_name is not None:
        raise InvalidInput("served_model_name", "is given", "it is the first argument's, and there is none")
    for name, path in map(named_path, arguments.named):
        if name in found:
            raise InvalidInput("model", f"{name!r} is there twice", "names differ")
        found[name] = Path(path)
    if len(found) > 1 and arguments.num_processes is not None:
        raise Unsupported("num_processes", "is given", "several processes hold one model")
    return found


def _loras(given: Sequence[str], models: Container[str]) -> list[LoRARequest]:
    """Returns the adapters of the first model; no name, theirs or a model's, is there twice."""
    found: dict[str, LoRARequest] = {}
    for text in given:
        if text.startswith("{"):
            asked = read_json(text, "lora_modules")
        else:
            asked = dict(zip(_OF_ADAPTER, named_path(text, "lora_modules"), strict=False))
        if unknown := asked.keys() - _OF_ADAPTER:
            wanted = f"an adapter has {', '.join(_OF_ADAPTER)}"
            raise InvalidInput("lora_modules", f"has the key {shown(min(unknown))}", wanted)
        name, path, base = (asked.get(key) for key in _OF_ADAPTER)
        if not name or not path or not all(isinstance(each, str) for each in asked.values()):
            raise InvalidInput("lora_modules", f"is {shown(text)}", "name and path must be there, and all strings")
        if name in found or name in models:
            raise InvalidInput("lora_modules", f"{name!r} is there twice, or a model's name", "names differ")
        found[name] = LoRARequest(name, len(found) + 1, path, base)
    return list(found.values())


def _name_of(model: Path) -> str:
    path = model.resolve()
    return path.stem if is_gguf(path) else path.name


def _check_address(host: str, port: int) -> None:
    """Refuses an address that cannot be listened on, before minutes of compiling."""
    check_int("port", port, 0, 65535)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # Like uvicorn: sockets that an earlier server left do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        raise InvalidInput(f"nothing can listen at host {host!r} and port {port}: {error}.") from None
