"""The rules of the house that a machine can check: import arrows, file sizes, forbidden statements, quiet imports."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.syntax import tree_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch_core", "jattn")
MAX_LINES = 500

# Which of our own rooms a room may import. torch_core.base is open to all.
ARROWS: dict[str, set[str]] = {
    **{f"torch_core.{room}": set() for room in ("base", "cache", "metadata", "device", "launch")},
    "torch_core.attention": {"torch_core.launch", "torch_core.device", "torch_core.metadata"},
    "torch_core.latent": {"torch_core.launch", "torch_core.device", "torch_core.attention", "torch_core.cache_writes"},
    "torch_core.cache_writes": {"torch_core.launch", "torch_core.device", "torch_core.attention"},
    "torch_core.adapters": {"torch_core.launch"},
    "torch_core.rowwise": {"torch_core.launch", "torch_core.device"},
    "torch_core.experts": {"torch_core.launch", "torch_core.device"},
    "torch_core.state": {"torch_core.launch", "torch_core.device"},
    "torch_core.all_reduce": {"torch_core.launch"},
    "torch_core.variants": {"torch_core.launch", "torch_core.serves", "torch_core.all_reduce"},
    # It finds the rooms of ops by their op.py.
    "torch_core.serves": {"torch_core.launch"},
    "torch_core.ops": {f"torch_core.{room}" for room in ("launch", "attention", "latent", "cache_writes", "state")},
    "torch_core.reference": {"torch_core.launch", "torch_core.serves"},
    "torch_core.vllm": {
        "torch_core.ops",
        "torch_core.launch",
        "torch_core.attention",
        "torch_core.latent",
        "torch_core.cache_writes",
        "torch_core.metadata",
        "torch_core.state",
    },
    "jattn.bridge": {"torch_core.launch"},
    "jattn.table": set(),
    "jattn.metadata": {"torch_core.metadata"},
    "jattn.ops": {
        "jattn.bridge",
        "jattn.metadata",
        "torch_core.launch",
        "torch_core.attention",
        "torch_core.latent",
        "torch_core.cache_writes",
        "torch_core.adapters",
        "torch_core.experts",
        "torch_core.rowwise",
        "torch_core.state",
    },
    "jattn.parallel": {
        "jattn.bridge",
        "jattn.ops",
        "jattn.metadata",
        "torch_core.launch",
        "torch_core.attention",
        "torch_core.cache_writes",
        "torch_core.metadata",
        "torch_core.all_reduce",
    },
    "jattn.pool": {"jattn.bridge", "torch_core.cache_writes"},
    "jattn.nn": {"jattn.ops", "jattn.pool", "jattn.metadata", "torch_core.adapters"},
    "jattn.llm": set(),
    "jattn.llm.models": {"jattn.nn", "jattn.ops", "jattn.metadata", "jattn.parallel", "torch_core.adapters"},
    **{f"jattn.llm.{room}": set() for room in ("reports", "processes", "workers", "tools", "paths", "small_models")},
    "jattn.llm.load": {
        "jattn.llm.paths",
        "jattn.llm.workers",
        "jattn.llm.reports",
        "jattn.llm.models",
        "jattn.metadata",
        "jattn.nn",
        "torch_core.adapters",
        "torch_core.metadata",
    },
    "jattn.llm.text": {"jattn.llm.load", "jattn.llm.models"},
    "jattn.llm.engine": {
        "jattn.nn",
        "jattn.llm.reports",
        "jattn.llm.models",
        "jattn.llm.load",
        "jattn.llm.processes",
        "jattn.llm.text",
        "jattn.llm.workers",
        "jattn.ops",
        "jattn.parallel",
        "jattn.pool",
        "jattn.metadata",
        "torch_core.adapters",
        "torch_core.cache",
        "torch_core.metadata",
    },
    "jattn.llm.arguments": {"jattn.llm.engine", "jattn.llm.load", "jattn.llm.processes"},
    "jattn.llm.serve": {
        "jattn.llm.paths",
        "jattn.llm.arguments",
        "jattn.llm.engine",
        "jattn.llm.load",
        "jattn.llm.text",
        "jattn.llm.tools",
    },
    "jattn.llm.chat": {"jattn.llm.engine", "jattn.llm.text"},
    "jattn.integrations": {"jattn.llm.engine", "jattn.llm.models", "jattn.nn"},
    "jattn.llm.testing": {
        "jattn.llm.paths",
        "jattn.llm.engine",
        "jattn.llm.load",
        "jattn.llm.models",
        "jattn.metadata",
        "jattn.ops",
        "jattn.pool",
        "jattn.table",
        "torch_core.metadata",
        "torch_core.attention",
        "torch_core.reference",
    },
}
OPEN_TO_ALL = {"torch_core.base"}
# The rooms on top, which may use everything below them; the last five are earlier names of rooms of jattn.llm.
TOP = {
    "jattn",
    "jattn.__main__",
    "jattn.cli",
    "jattn.compilation_cache",
    "jattn.doctor",
    "jattn.extras",
    "jattn.bench",
} | {f"jattn.{name}" for name in ("engine", "load", "models", "serve", "testing")}
# Rooms with rooms of their own.
NESTED = ("jattn.llm",)

# What each room, and each folder of a room, may take from outside the standard library, by the longest name that
# fits; a room that is not here takes any dependency.
OUTSIDE: dict[str, set[str]] = {
    "torch_core": set(),
    "torch_core.launch": {"numpy", "jaxtyping", "triton"},
    "torch_core.launch.launcher": {"torch", "triton"},
    "torch_core.launch.tensors": {"numpy", "torch"},
    "torch_core.launch.run": {"torch"},
    "torch_core.metadata": {"numpy"},
    "torch_core.device": {"triton"},
    "torch_core.latent.packed": {"torch"},
    "torch_core.variants": {"triton"},
    "torch_core.all_reduce": {"triton"},
    "torch_core.vllm": {"numpy", "torch"},
    # Its processes start without jax and torch.
    **{f"jattn.llm.{room}": set() for room in ("tools", "workers", "paths")},
    "jattn.llm.workers.templates": {"jinja2"},
    "jattn.llm.workers.tokens": {"tokenizers"},
    **{
        f"torch_core.{op}{place}": libraries
        for op in ("attention", "latent", "cache_writes", "adapters", "experts", "rowwise", "state")
        for place, libraries in {
            "": {"jaxtyping", "numpy", "triton"},
            ".kernels": {"triton"},
            **{key: {"numpy", "torch"} for key in (".cpu", ".backward", ".reference", ".torch")},
        }.items()
    },
}
NEVER = {"torch_core": {"jax", "jaxlib", "flax"}}
FORBIDDEN_CALLS = {"eval", "exec"}


def sources() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield room_of(module_of(path)), path


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[: 3 if ".".join(parts[:2]) in NESTED else 2])


def import_statements(tree: ast.AST, *, for_types_too: bool = False) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements, the ones inside functions included; those for type checkers only when asked for."""
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and (for_types_too or id(node) not in skipped):
            yield node


def imported(tree: ast.AST) -> Iterator[str]:
    """Every imported module, as far as the rooms."""
    for node in import_statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [alias.name for alias in node.names]
            # "from torch_core import launch" imports the room, not the package alone.
            is_package = node.module in PACKAGES + NESTED
            yield from (f"{node.module}.{name}" if is_package else node.module for name in names)
        else:
            yield f"relative import of level {node.level}"


def broken_arrows(importer: str, modules: Iterator[str]) -> list[str]:
    return [f"{importer} imports {module}" for module in modules if not may_import(importer, module)]


def may_import(importer: str, module: str) -> bool:
    room = room_of(importer)
    first = module.split(".")[0]
    if first.startswith("relative import"):
        return False
    if first in PACKAGES:
        target = room_of(module)
        return room in TOP or target in ARROWS.get(room, set()) | OPEN_TO_ALL | {room, first}
    if first in NEVER.get(room.split(".")[0], set()):
        return False
    if first in sys.stdlib_module_names:
        # What begins with an underscore goes without notice: _sha256 left with Python 3.12.
        return first == "__future__" or not first.startswith("_")
    parts = importer.split(".")
    named = (".".join(parts[:end]) for end in range(len(parts), 1, -1))
    return first in next(
        (OUTSIDE[name] for name in named if name in OUTSIDE), {first} if parts[0] == "jattn" else set()
    )


def test_every_import_follows_an_arrow() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {line}"
        for _, path in sources()
        for line in broken_arrows(module_of(path), imported(tree_of(path)))
    ]

    assert broken == []


def test_every_room_is_drawn_on_the_map() -> None:
    rooms = {room for room, _ in sources()} - {"torch_core"}

    assert rooms - set(ARROWS) - TOP == set()


@pytest.mark.parametrize(
    ("room", "line", "verdict"),
    [
        ("torch_core.cache", "import numpy", ["torch_core.cache imports numpy"]),
        ("torch_core.cache", "from _sha256 import sha256", ["torch_core.cache imports _sha256"]),
        ("torch_core.metadata", "from torch_core.cache import pool", ["torch_core.metadata imports torch_core.cache"]),
        ("torch_core.launch.run", "import jax.numpy", ["torch_core.launch.run imports jax.numpy"]),
        ("jattn.ops", "from torch_core import device", ["jattn.ops imports torch_core.device"]),
        ("jattn.nn", "from . import paged", ["jattn.nn imports relative import of level 1"]),
        ("jattn.llm.engine", "from torch_core.reference import x", ["jattn.llm.engine imports torch_core.reference"]),
        ("jattn.llm.engine", "from torch_core.cache import CacheManager", []),
        ("jattn.llm.engine", "if TYPE_CHECKING:\n    import torch_core.reference", []),
    ],
)
def test_a_wrong_import_is_found(room: str, line: str, verdict: list[str]) -> None:
    assert broken_arrows(room, imported(ast.parse(line))) == verdict


def import_circle(modules: dict[str, ast.AST], *, for_types_too: bool = False) -> list[str]:
    """One way from a module through its imports back to itself; empty if there is none."""
    graph: dict[str, set[str]] = {}
    for module, tree in modules.items():
        named = set()
        for node in import_statements(tree, for_types_too=for_types_too):
            above = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            named |= {above + alias.name for alias in node.names}
        # "from torch_core.cache import swap" imports the file swap, "... import CacheManager" the room's __init__.
        graph[module] = {
            next((place for place in (name, name.rpartition(".")[0]) if place in modules), "") for name in named
        } - {""}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def modules_of(*rooms: str) -> dict[str, ast.AST]:
    return {module_of(path): tree_of(path) for room, path in sources() if not rooms or room in rooms}


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert import_circle(modules_of()) == []


def test_no_file_names_itself_by_way_of_types() -> None:
    assert import_circle(modules_of(), for_types_too=True) == []


@pytest.mark.parametrize(
    ("lines", "for_types_too", "circle"),
    [
        ({"room.a": "import room.b", "room.b": "def f():\n    from room.a import x"}, False, {"room.a", "room.b"}),
        ({"room.a": "from room import b", "room.b": "from room import a"}, False, {"room.a", "room.b"}),
        ({"room": "from room.a import x", "room.a": "from room import x"}, False, {"room", "room.a"}),
        ({"room.a": "if TYPE_CHECKING:\n    import room.b", "room.b": "import room.a"}, True, {"room.a", "room.b"}),
        ({"room.a": "if TYPE_CHECKING:\n    import room.b", "room.b": "import room.a"}, False, set()),
        ({"room": "from room.a import x", "room.a": "from room import b", "room.b": ""}, False, set()),
    ],
)
def test_a_circle_is_found(lines: dict[str, str], for_types_too: bool, circle: set[str]) -> None:
    modules: dict[str, ast.AST] = {module: ast.parse(text) for module, text in lines.items()}
    assert set(import_circle(modules, for_types_too=for_types_too)) == circle


def test_no_file_is_longer_than_a_person_reads() -> None:
    paths = [*ROOT.glob("tests/**/*.py"), *(path for _, path in sources())]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_a_family_takes_one_short_file() -> None:
    """What families share has files of its own; a family that does not fit wants an option of the decoder."""
    shared = ("__init__.py", "family.py", "gguf.py", "registry.py")
    files = (path for path in ROOT.glob("jattn/llm/load/families/*.py") if path.name not in shared)
    lengths = {path.name: len(path.read_text().splitlines()) for path in files}
    assert lengths
    assert {name: length for name, length in lengths.items() if length >= 80} == {}


def forbidden(tree: ast.AST, *, may_print: bool) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append(f"assert in line {node.lineno}")
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"bare except in line {node.lineno}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = node.func.id
            if called in FORBIDDEN_CALLS or (called == "print" and not may_print):
                found.append(f"{called} in line {node.lineno}")
        if isinstance(node, ast.Import) and any(alias.name == "pickle" for alias in node.names):
            found.append(f"pickle in line {node.lineno}")
    return found


def test_no_assert_print_eval_or_pickle_in_the_packages() -> None:
    # What a command prints is its result; everything else raises or returns.
    printing = {"jattn.cli", "jattn.bench"}
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for room, path in sources()
        for line in forbidden(tree_of(path), may_print=room in printing)
    ]

    assert found == []


def test_forbidden_statements_are_found() -> None:
    code = "assert x\nprint(x)\neval(x)\nimport pickle\ntry:\n    pass\nexcept:\n    pass\n"

    assert len(forbidden(ast.parse(code), may_print=False)) == 5


PROBE = """
import json, os, sys
{libraries}
before = dict(os.environ)
for stage in {stages}:
    exec(stage)
    loaded = sorted({{name.split(".")[0] for name in sys.modules}})
    state = {{"environment": {{k: v for k, v in os.environ.items() if before.get(k) != v}}, "loaded": loaded}}
    if "jax" in loaded:
        import jax
        from jax._src import xla_bridge
        state["backends"] = list(xla_bridge._backends)
        state["config"] = [name for name, value in default_config.items() if jax.config.values.get(name) != value]
    if "torch" in loaded:
        import torch
        state["cuda"] = torch.cuda.is_initialized()
        state["threads"] = torch.get_num_threads() == threads
    print("STATE", json.dumps(state))
"""
# jax and torch write some variables of their own when they are imported; only what comes after counts.
WITH_DEFAULTS = """
import jax, torch
default_config = dict(jax.config.values)
threads = torch.get_num_threads()
"""


def in_fresh_process(*stages: str, libraries: str = "") -> list[dict]:
    """Runs some code in a new process; returns the state of the process after each stage."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(stages=stages, libraries=libraries)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        timeout=300,
    )
    lines = [line.removeprefix("STATE ") for line in done.stdout.splitlines() if line.startswith("STATE ")]
    return [json.loads(line) for line in lines]


def test_importing_jattn_changes_no_environment_no_jax_config_and_no_device() -> None:
    state, changed = in_fresh_process(
        "import jattn, jattn.llm.engine, jattn.ops, jattn.nn, jattn.pool, jattn.llm.load, jattn.llm.serve, jattn.cli",
        "os.environ['NEW'] = '1'; jax.config.update('jax_debug_nans', True); jax.devices()",
        libraries=WITH_DEFAULTS,
    )

    assert state["environment"] == {}
    assert state["config"] == []
    assert state["backends"] == []
    assert state["cuda"] is False
    assert state["threads"] is True
    # A change would be seen.
    assert changed["environment"] == {"NEW": "1"}
    assert changed["config"] == ["jax_debug_nans"]
    assert changed["backends"] != []


def test_the_allocator_loads_no_framework_the_metadata_builders_numpy_and_jattn_neither_jax_nor_torch() -> None:
    allocator, builders, package = in_fresh_process(
        "import torch_core.cache", "import torch_core.metadata", "import jattn"
    )

    assert {"torch", "numpy", "jax", "triton"} & set(allocator["loaded"]) == set()
    assert {"torch", "jax", "triton"} & set(builders["loaded"]) == set()
    assert {"torch", "jax", "triton"} & set(package["loaded"]) == set()


def test_torch_is_loaded_where_tensors_are_asked_for_alone() -> None:
    """It takes half of what `import jattn.llm.engine` takes in all, and seconds from a slow disk."""
    stages = (
        "import jattn.llm.engine, jattn.nn, jattn.parallel, jattn.pool",
        "import jattn; jattn.LLM().generate('Once', jattn.SamplingParams(max_tokens=2))",
        "import torch_core.launch.planner, torch_core.variants, triton",
    )
    states = in_fresh_process(*stages, libraries="import jax; default_config = dict(jax.config.values)")
    assert [stage for stage, state in zip(stages, states, strict=True) if "torch" in state["loaded"]] == []


def test_every_public_name_can_be_imported() -> None:
    import jattn

    missing = [name for name in jattn.__all__ if getattr(jattn, name, None) is None]

    assert missing == []


def test_type_checkers_see_the_public_names_that_exist() -> None:
    import jattn

    (block,) = (
        node for node in ast.parse((ROOT / "jattn" / "__init__.py").read_text()).body if isinstance(node, ast.If)
    )
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]

    assert {alias.asname: node.module for node in imports for alias in node.names} == jattn._HOME_OF
