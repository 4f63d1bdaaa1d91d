"""The parameters of vLLM's operations and the fields of its metadata: a recorded table, and a command that reads a
checkout of vLLM.

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

from torch_core import vllm
from torch_core.vllm import ops
from torch_core.vllm.ops import prefix_prefill, states

TABLE = Path(__file__).with_name("signatures.json")
_FLA, _MAMBA = "third_party/flash_linear_attention/ops", "model_executor/layers/mamba/ops"
#: vLLM's operations of layers with a state, likewise.
OF_STATES: dict[str, Callable[..., Any]] = {
    f"{_FLA}/chunk.chunk_gated_delta_rule": states.chunk_gated_delta_rule,
    f"{_FLA}/fused_recurrent.fused_recurrent_gated_delta_rule": states.fused_recurrent_gated_delta_rule,
    f"{_MAMBA}/causal_conv1d.causal_conv1d_fn": states.causal_conv1d_fn,
    f"{_MAMBA}/causal_conv1d.causal_conv1d_update": states.causal_conv1d_update,
    f"{_MAMBA}/ssd_combined.mamba_chunk_scan_combined_varlen": states.mamba_chunk_scan_combined_varlen,
    f"{_MAMBA}/mamba_ssm.selective_state_update": states.selective_state_update,
}
#: Its metadata of these layers, by file and name, with the class that has the common fields.
METADATA: dict[str, tuple[type, str]] = {
    "gdn_attn.GDNAttentionMetadata": (vllm.GDNAttentionMetadata, ""),
    "linear_attn.LinearAttentionMetadata": (vllm.LinearAttentionMetadata, ""),
    "mamba1_attn.Mamba1AttentionMetadata": (vllm.Mamba1AttentionMetadata, "mamba_attn.BaseMambaAttentionMetadata"),
    "mamba2_attn.Mamba2AttentionMetadata": (vllm.Mamba2AttentionMetadata, "mamba_attn.BaseMambaAttentionMetadata"),
    "short_conv_attn.ShortConvAttentionMetadata": (
        vllm.ShortConvAttentionMetadata,
        "mamba_attn.BaseMambaAttentionMetadata",
    ),
}
#: Its builders whose `build` has arguments of its own.
BUILDERS: dict[str, type] = {"gdn_attn.GDNAttentionMetadataBuilder": vllm.GDNAttentionMetadataBuilder}
#: Fields that are plans of its kernels, and snapshots within a prompt, which are not taken here.
OF_KERNELS = {"aiter_prefill_metadata", "batch_ptr", "bc_pre_scratch", "checkpoint", "checkpoint_chunk_idx"}
OF_KERNELS |= {"checkpoint_meta", "chunk_indices", "chunk_offsets", "flashinfer_checkpoint_plan", "is_flush_d"}
OF_KERNELS |= {"nums_dict", "replayssm_scratch", "replayssm_state_indices_d", "token_chunk_offset_ptr", "write_pos_d"}
#: vLLM's operations of attention, by file and name, and their counterparts here.
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


def recorded(part: str = "operations") -> dict[str, list[str]]:
    """Returns the parameters of each operation in the table, as `name` or `name=default`; of "metadata" the fields."""
    return json.loads(TABLE.read_text())[part]


def of_checkout(path: Path) -> dict[str, dict[str, list[str]]]:
    """Returns all parts of the table, of a checkout of vLLM."""
    attention = path / "vllm/v1/attention"
    found = {name: _of_source(attention / "ops", *name.split(".")) for name in OPERATIONS}
    found |= {name: _of_source(path / "vllm", *name.split(".")) for name in OF_STATES}
    found |= {name: _of_source(attention / "backends", *name.split("."), method="build") for name in BUILDERS}
    fields = {
        name: [each for part in (base, name) if part for each in _fields(attention / "backends", *part.split("."))]
        for name, (_, base) in METADATA.items()
    }
    return {"operations": found, "metadata": fields}


def of_ours(operation: Callable[..., None]) -> list[str]:
    """Returns the same of one of our operations."""
    return [
        each.name if each.default is each.empty else f"{each.name}={each.default!r}"
        for each in inspect.signature(operation).parameters.values()
    ]


def _of_source(folder: Path, file: str, name: str, method: str = "") -> list[str]:
    body = ast.parse((folder / f"{file}.py").read_text()).body
    if method:
        body, name = _class(body, name), method
    arguments = next(node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == name)
    required = len(arguments.args) - len(arguments.defaults)
    return [each.arg for each in arguments.args[:required]] + [
        f"{each.arg}={_default(default)!r}"
        for each, default in zip(arguments.args[required:], arguments.defaults, strict=True)
    ]


def _class(body: list[ast.stmt], name: str) -> list[ast.stmt]:
    return next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name)


def _fields(folder: Path, file: str, name: str) -> list[str]:
    body = _class(ast.parse((folder / f"{file}.py").read_text()).body, name)
    return [node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]


#: The values of names in defaults.
_NAMED = {"NULL_BLOCK_ID": states.NULL_BLOCK_ID, "PAD_SLOT_ID": states.PAD_SLOT_ID, "float('inf')": float("inf")}


def _default(node: ast.expr) -> Any:
    """Returns a literal; None for a member of vLLM's enums, which this project does not have."""
    if isinstance(node, ast.Tuple):
        return tuple(map(_default, node.elts))
    if (text := ast.unparse(node)) in _NAMED:
        return _NAMED[text]
    return None if isinstance(node, ast.Attribute) else ast.literal_eval(node)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--write", metavar="VERSION", help="record the checkout's parameters as those of a version")
    options = parser.parse_args()
    found = of_checkout(options.path)
    if options.write:
        TABLE.write_text(json.dumps({"vllm": options.write, **found}, indent=1) + "\n")
    differing = 0
    for part, entries in found.items():
        old = recorded(part)
        names = [name for name in entries if entries[name] != old.get(name)]
        for name in names:
            print(f"{name}:\n  recorded {old.get(name)}\n  found    {entries[name]}")
        print(f"{len(entries) - len(names)} of {len(entries)} {part} are as recorded.")
        differing += len(names)
    return differing > 0


if __name__ == "__main__":
    raise SystemExit(main())
