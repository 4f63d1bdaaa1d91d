"""The parameters of vLLM's operations: a recorded table, and a command that reads a checkout of vLLM.

    python -m tests.vllm.signatures PATH                  compare the table with the checkout
    python -m tests.vllm.signatures PATH --write 0.33.0   record it as that version

PATH is the folder that has `vllm/v1/attention/ops`, of a checkout or of an unpacked wheel.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_core.vllm import ops
from torch_core.vllm.ops import prefix_prefill

TABLE = Path(__file__).with_name("signatures.json")
#: vLLM's operations, by file and name, and their counterparts here.
OPERATIONS: dict[str, Callable[..., None]] = {
    "chunked_prefill_paged_decode.chunked_prefill_paged_decode": ops.chunked_prefill_paged_decode,
    "merge_attn_states.merge_attn_states": ops.merge_attn_states,
    "prefix_prefill.context_attention_fwd": prefix_prefill.context_attention_fwd,
    "triton_decode_attention.decode_attention_fwd": ops.decode_attention_fwd,
    "triton_prefill_attention.context_attention_fwd": ops.context_attention_fwd,
    "triton_reshape_and_cache_flash.triton_reshape_and_cache_flash": ops.triton_reshape_and_cache_flash,
    "triton_reshape_and_cache_flash.triton_reshape_and_cache_flash_diffkv": ops.triton_reshape_and_cache_flash_diffkv,
    "triton_reshape_and_cache_flash.triton_reshape_and_cache_flash_per_token_head_quant": (
        ops.triton_reshape_and_cache_flash_per_token_head_quant
    ),
    "triton_unified_attention.unified_attention": ops.unified_attention,
    "triton_unified_attention_diffkv.unified_attention_diffkv": ops.unified_attention_diffkv,
}


def recorded() -> dict[str, list[str]]:
    """Returns the parameters of each operation in the table, as `name` or `name=default`."""
    return json.loads(TABLE.read_text())["operations"]


def of_checkout(path: Path) -> dict[str, list[str]]:
    """Returns the same of a checkout of vLLM."""
    return {name: _of_source(path / "vllm/v1/attention/ops", *name.split(".")) for name in OPERATIONS}


def of_ours(operation: Callable[..., None]) -> list[str]:
    """Returns the same of one of our operations."""
    return [
        each.name if each.default is each.empty else f"{each.name}={each.default!r}"
        for each in inspect.signature(operation).parameters.values()
    ]


def _of_source(folder: Path, file: str, name: str) -> list[str]:
    body = ast.parse((folder / f"{file}.py").read_text()).body
    arguments = next(node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == name)
    required = len(arguments.args) - len(arguments.defaults)
    return [each.arg for each in arguments.args[:required]] + [
        f"{each.arg}={_default(default)!r}"
        for each, default in zip(arguments.args[required:], arguments.defaults, strict=True)
    ]


def _default(node: ast.expr) -> Any:
    """Returns a literal; None for a member of vLLM's enums, which this project does not have."""
    return None if isinstance(node, ast.Attribute) else ast.literal_eval(node)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--write", metavar="VERSION", help="record the checkout's parameters as those of a version")
    options = parser.parse_args()
    found = of_checkout(options.path)
    if options.write:
        TABLE.write_text(json.dumps({"vllm": options.write, "operations": found}, indent=1) + "\n")
    differing = [name for name, parameters in recorded().items() if parameters != found[name]]
    for name in differing:
        print(f"{name}:\n  recorded {recorded()[name]}\n  found    {found[name]}")
    print(f"{len(found) - len(differing)} of {len(found)} operations have the recorded parameters.")
    return bool(differing)


if __name__ == "__main__":
    raise SystemExit(main())
