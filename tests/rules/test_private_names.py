"""No file of the product uses the private names of another one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.syntax import tree_of

ROOT = Path(__file__).parents[2]
#: Private by their spelling alone: methods of named tuples, and vLLM's names of a layer's scales.
PUBLIC = {"_replace", "_fields", "_asdict", "_k_scale", "_v_scale", "_q_scale"}
#: Names of libraries that offer no public one.
OF_LIBRARIES = {
    "jattn/integrations/tunix_models.py": {"layer._query_norm", "layer._key_norm"},
    "jattn/bench/backward.py": {"found._flash_attn_fwd", "found._flash_attn_bwd"},
    "jattn/bench/overhead.py": {"jitted._cache_size"},
    "torch_core/attention/cpu/core.py": {"torch._scaled_dot_product_flash_attention_for_cpu"},
    "torch_core/device/gluon_names.py": {"memory._reinterpret"},
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names that the file defines, attributes of `self` among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and is_own(node):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def foreign_names(tree: ast.AST) -> list[str]:
    own = set(own_names(tree))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            found.append(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("jattn", "torch_core"):
            found += [alias.name for alias in node.names if is_private(alias.name)]
    return found


def test_no_file_uses_the_private_names_of_another_one() -> None:
    files = [path for package in ("jattn", "torch_core") for path in sorted((ROOT / package).rglob("*.py"))]
    names = {str(path.relative_to(ROOT)): set(foreign_names(tree_of(path))) for path in files}

    assert {path: found for path, found in names.items() if found - OF_LIBRARIES.get(path, set())} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(impl):\n    impl._rows()", ["impl._rows"]),
        ("from torch_core.vllm.impl import _needed", ["_needed"]),
        ("import jattn.cli as cli\ncli._parser()", ["cli._parser"]),
        ("class A:\n    def f(self, other):\n        self._x = other._x", []),
        ("import numpy as np\nx = row._replace(y=1)\nz.__doc__", []),
    ],
)
def test_a_private_name_of_another_file_is_found(text: str, found: list[str]) -> None:
    assert foreign_names(ast.parse(text)) == found
