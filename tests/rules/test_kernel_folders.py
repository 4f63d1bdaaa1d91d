"""No kernel imports the folder of another one: their shared parts lie in the op's room or in torch_core.device."""

from __future__ import annotations

import ast

import pytest

from tests.rules.test_architecture import ROOT, import_statements, modules_of, sources


def kernel_folder(module: str) -> str | None:
    """The folder of a kernel that a module lies in: torch_core.attention.kernels.rows; None outside of them."""
    parts = module.split(".")
    end = parts.index("kernels") + 2 if "kernels" in parts else len(parts) + 1
    return ".".join(parts[:end]) if end <= len(parts) else None


def imports_of_other_kernels(module: str, tree: ast.AST) -> list[str]:
    """Imports of a kernel's folder from another one, for types too: shared parts belong to their room or to device."""
    named = {
        place
        for node in import_statements(tree, for_types_too=True)
        for alias in node.names
        for place in [f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name]
    }
    own = kernel_folder(module)
    folders = {folder for place in named if (folder := kernel_folder(place))}
    return sorted(f"{module} imports {folder}" for folder in folders - {own}) if own else []


def test_no_kernel_imports_the_folder_of_another_one() -> None:
    modules = modules_of()
    assert sum(kernel_folder(module) is not None for module in modules) > 50
    assert [line for module, tree in modules.items() for line in imports_of_other_kernels(module, tree)] == []


def test_every_file_of_kernels_lies_in_the_folder_of_one() -> None:
    files = [path.relative_to(ROOT) for _, path in sources() if path.parent.name == "kernels"]
    assert [str(path) for path in files if path.name != "__init__.py"] == []


@pytest.mark.parametrize(
    ("module", "line", "verdict"),
    [
        (
            "torch_core.latent.kernels.mla.plan",
            "from torch_core.attention.kernels.rows.plan import rows_launch",
            ["torch_core.latent.kernels.mla.plan imports torch_core.attention.kernels.rows"],
        ),
        (
            "torch_core.attention.kernels.split.pairs",
            "from torch_core.attention.kernels import rows",
            ["torch_core.attention.kernels.split.pairs imports torch_core.attention.kernels.rows"],
        ),
        (
            "torch_core.attention.kernels.split.kernel",
            "def f():\n    import torch_core.attention.kernels.rows.kernel",
            ["torch_core.attention.kernels.split.kernel imports torch_core.attention.kernels.rows"],
        ),
        (
            "torch_core.attention.kernels.split.plan",
            "if TYPE_CHECKING:\n    from torch_core.attention.kernels.rows.plan import rows_launch",
            ["torch_core.attention.kernels.split.plan imports torch_core.attention.kernels.rows"],
        ),
        ("torch_core.attention.kernels.split.plan", "from torch_core.attention.kernels.split import pairs", []),
        ("torch_core.attention.kernels.split.plan", "from torch_core.attention.partials import Chunks", []),
        ("torch_core.attention.choose", "from torch_core.attention.kernels.rows.plan import rows_launch", []),
    ],
)
def test_an_import_of_another_kernel_is_found(module: str, line: str, verdict: list[str]) -> None:
    assert imports_of_other_kernels(module, ast.parse(line)) == verdict
