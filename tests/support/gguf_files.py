"""GGUF files for tests: a small writer of the format, and checkpoints of transformers as llama.cpp converts them."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

ALIGNMENT = 32
#: Type codes of numpy's kinds.
_CODES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


class Packed(NamedTuple):
    """A tensor of a type with blocks: its number, its shape (slowest first) and its bytes."""

    kind: int
    shape: tuple[int, ...]
    data: bytes


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def value_bytes(value: Any) -> bytes:
    """A value with its type before it; ints are uint32, floats float32, lists have the type of their first element."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        if value and isinstance(value[0], str):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        first = value[0] if value else 0
        value = np.array(value, bool if isinstance(first, bool) else "f4" if isinstance(first, float) else "i4")
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, _CODES[value.dtype.str[1:]], len(value)) + value.tobytes()
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray | Packed], version: int = 3) -> bytes:
    """A whole file."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(text(key) + value_bytes(value) for key, value in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Packed):
            array = np.ascontiguousarray(tensor)
            kind = {"float32": 0, "float16": 1, "bfloat16": 30}[str(array.dtype)]
            tensor = Packed(kind, array.shape, array.tobytes())
        header += text(name) + struct.pack("<I", len(tensor.shape))
        header += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        header += struct.pack("<IQ", tensor.kind, len(data))
        data += tensor.data + bytes(-len(tensor.data) % ALIGNMENT)
    return header + bytes(-len(header) % ALIGNMENT) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray | Packed]) -> Path:
    """Writes a file and returns its path."""
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


#: By family of transformers llama.cpp's architecture.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "GraniteForCausalLM": "granite",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GPT2LMHeadModel": "gpt2",
    "Starcoder2ForCausalLM": "starcoder2",
}
_PERMUTED = ("llama", "granite")
# In order: the first that is found in a name of transformers is replaced.
_NAMES = [
    (r"^(?:model|transformer)\.(?:embed_tokens|wte)\.", "token_embd."),
    (r"^transformer\.wpe\.", "position_embd."),
    (r"^(?:model\.norm|transformer\.ln_f)\.", "output_norm."),
    (r"^lm_head\.", "output."),
    (r"^(?:model\.layers|transformer\.h)\.(\d+)\.", r"blk.\1."),
]
_IN_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "attn.c_attn": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "attn.c_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_OF_EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def gguf_of_checkpoint(folder: Path, path: Path, **more: Any) -> Path:
    """Writes a checkpoint of transformers as a GGUF file of float32 tensors; `more` is further metadata."""
    raw = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[raw["architectures"][0]]
    found = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors: dict[str, Any] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, array in found.items():
        new = name
        for pattern, replacement in _NAMES:
            new = re.sub(pattern, replacement, new)
        if new.startswith("blk."):
            _, layer, rest = new.split(".", 2)
            module, _, leaf = rest.rpartition(".")
            if expert := _EXPERT.fullmatch(module):
                key = f"blk.{layer}.ffn_{_OF_EXPERTS[expert[2]]}_exps.weight"
                experts.setdefault(key, {})[int(expert[1])] = array
                continue
            is_gemma = arch in ("gemma2", "gemma3")
            after = "post_attention_norm" if is_gemma else "ffn_norm"
            module = {**_IN_LAYER, "post_attention_layernorm": after}[module]
            new = f"blk.{layer}.{module}.{leaf}"
            if arch == "gpt2" and array.ndim == 2:
                array = array.T
            if arch in _PERMUTED and module in ("attn_q", "attn_k"):
                heads = raw["num_attention_heads"] if module == "attn_q" else raw["num_key_value_heads"]
                halves = array.reshape(heads, 2, -1, *array.shape[1:])
                array = halves.swapaxes(1, 2).reshape(array.shape)
            if module == "ffn_gate_inp_shexp":
                array = array[0]
        if arch.startswith("gemma") and "norm" in new:
            array = array + np.float32(1)
        tensors[new] = array
    tensors |= {key: np.stack([parts[index] for index in sorted(parts)]) for key, parts in experts.items()}
    metadata = {"general.architecture": arch, **_sizes(raw, arch), **more}
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)


def _sizes(raw: dict[str, Any], arch: str) -> dict[str, Any]:
    first: dict[str, Any] = {
        name: next((raw[key] for key in keys if raw.get(key) is not None), None) for name, keys in _KEYS.items()
    }
    rope = raw.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    heads = first["attention.head_count"]
    head_dim = raw.get("head_dim") or first["embedding_length"] // heads
    if arch != "gpt2":
        first["rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
        first["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        first["attention.key_length"] = first["attention.value_length"] = head_dim
    else:
        first["feed_forward_length"] = first["feed_forward_length"] or 4 * first["embedding_length"]
    if arch.startswith(("gemma2", "gemma3", "phi3")):
        first["attention.sliding_window"] = raw.get("sliding_window")
    if arch == "granite":
        names = {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}
        names |= {"attention.scale": "attention_multiplier", "logit_scale": "logits_scaling"}
        first |= {key: float(raw[name]) for key, name in names.items()}
    if arch in ("gemma2", "gemma3"):
        first |= {key: raw.get(name) for key, name in _CAPS.items()}
    if rope.get("rope_type") == "linear":
        first |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    return {f"{arch}.{key}": value for key, value in first.items() if value is not None}


_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_KEYS = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "norm_epsilon"),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
