"""The options of the attention modules: each one is in the signature, and a wrong value is refused at construction."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.nn import (
    GatedDeltaNet,
    KimiDeltaAttention,
    LightningAttention,
    Mamba2,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    PagedAttention,
    ShortConv,
    SparseLatentAttention,
    linen,
)
from jattn.nn.options import FlaxOptions
from torch_core.base.errors import InvalidInput

SHARED: dict[str, tuple[Any, str]] = {
    "scale": ("0.5", "scale is '0.5'; it must be a float."),
    "sliding_window": ("3", "sliding_window is '3'; it must be an int from 1 (the query"),
    "attention_chunk": (0, "attention_chunk is 0; it must be from 1 to 2147483647."),
    "logits_soft_cap": (-1.0, "logits_soft_cap is -1.0; it must be a positive finite number, or None for off."),
    "alibi_slopes": (1.0, "alibi_slopes is 1.0; it must be a sequence with a number for each head."),
    "use_alibi_sqrt": (1, "use_alibi_sqrt is 1; it must be True or False."),
    "implementation": (
        "cuda",
        "implementation is 'cuda'; use one of 'triton', 'torch', 'xla', or None to let jattn choose.",
    ),
    "num_kv_heads": ("2", "num_kv_heads is '2'; it must be an int, or None."),
}
OF_MODULE: dict[str, tuple[Any, str]] = {
    "qkv_features": (16.0, "qkv_features is 16.0; it must be an int, or None."),
    "head_dim": ("4", "head_dim is '4'; it must be an int, or None."),
    "rope": ("yarn", "rope is 'yarn'; it must be a function or None."),
    "sinks": (1, "sinks is 1; it must be True or False."),
    "attention_type": (None, "attention_type is None; it must be a string."),
    "kv_sharing": ("no", "kv_sharing is 'no'; it must be True or False."),
    "k_scale": ("1", "k_scale is '1'; it must be a number or an array of one element."),
    "deterministic_gradients": (0, "deterministic_gradients is 0; it must be True or False."),
    "dtype": ("wide", "dtype is 'wide'; it must be a dtype, such as jnp.bfloat16."),
    "dropout_rate": ("0.1", "dropout_rate is '0.1'; it must be a finite number from 0 to 1."),
    "decode": ("yes", "decode is 'yes'; it must be True or False."),
    "kernel_init": (0.02, "kernel_init is 0.02; it must be a function."),
    "rngs": (0, "rngs is 0; it must be a Rngs."),
}
OF_LINEN: dict[str, tuple[Any, str]] = {
    "max_length": ("8", "max_length is '8'; it must be an int, or None."),
    "dropout_rate": ("0.1", "dropout_rate is '0.1'; it must be a finite number."),
    "use_bias": (None, "use_bias is None; it must be True or False."),
}
OF_CORE: dict[str, tuple[Any, str]] = {
    "causal": (None, "causal is None; it must be True or False."),
    "value_head_dim": ("8", "value_head_dim is '8'; it must be an int, or None."),
    "kv_chunk_size": (64, "kv_chunk_size is 64; it must be a power of two, 128 or more."),
}
OF_LATENTS: dict[str, tuple[Any, str]] = {
    "scale": ("0.5", "scale is '0.5'; it must be a float."),
    "epsilon": ("1e-6", "epsilon is '1e-6'; it must be a finite number of at least 0."),
    "use_bias": (1, "use_bias is 1; it must be True or False."),
    "rope": ("yarn", "rope is 'yarn'; it must be a function or None."),
    "q_lora_rank": (1.5, "q_lora_rank is 1.5; it must be an int from 1 to 65536"),
    "implementation": (
        "cuda",
        "implementation is 'cuda'; use one of 'triton', 'torch', 'xla', or None to let jattn choose.",
    ),
    "kernel_init": (0.02, "kernel_init is 0.02; it must be a function."),
    "param_dtype": (3, "param_dtype is 3; it must be a dtype, such as jnp.bfloat16."),
}


def cases(*options: dict[str, tuple[Any, str]]) -> list[Any]:
    return [pytest.param({name: value}, text, id=name) for group in options for name, (value, text) in group.items()]


@pytest.mark.parametrize(("option", "message"), cases(SHARED, OF_MODULE))
def test_multi_head_attention_refuses_a_wrong_option_at_construction(option: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"rngs": nnx.Rngs(0), **option}
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}"):
        MultiHeadAttention(4, 16, **arguments)


@pytest.mark.parametrize(("option", "message"), cases(SHARED, OF_LINEN))
def test_the_linen_twin_refuses_a_wrong_option_at_construction(option: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}"):
        linen.MultiHeadAttention(4, **option)


@pytest.mark.parametrize(("option", "message"), cases(SHARED, OF_CORE))
def test_paged_attention_refuses_a_wrong_option_at_construction(option: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}"):
        PagedAttention(4, 8, **option)


@pytest.mark.parametrize(("option", "message"), cases(OF_LATENTS))
def test_latent_attention_refuses_a_wrong_option_at_construction(option: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    arguments |= {"rngs": nnx.Rngs(0), **option}
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}"):
        MultiHeadLatentAttention(2, 12, **arguments)


def test_sparse_attention_has_the_options_of_latent_attention() -> None:
    sparse = inspect.signature(SparseLatentAttention.__init__).parameters
    assert sparse.keys() - {"indexer"} == inspect.signature(MultiHeadLatentAttention.__init__).parameters.keys()


def test_numbers_of_numpy_are_options_too() -> None:
    numbers: dict[str, Any] = {"num_heads": np.int64(4), "scale": np.float32(0.5), "alibi_slopes": np.ones(4)}
    module = MultiHeadAttention(in_features=16, k_scale=jnp.ones(1), rngs=nnx.Rngs(0), **numbers)
    assert module.core.scale == 0.5


def test_the_options_of_flax_are_those_of_its_module() -> None:
    """What this module declares itself is not passed on."""
    ours = inspect.signature(MultiHeadAttention.__init__).parameters
    theirs = inspect.signature(nnx.MultiHeadAttention.__init__).parameters
    assert theirs.keys() - ours.keys() == set()
    assert FlaxOptions.__annotations__.keys() - theirs.keys() == set()


def test_pyright_finds_a_misspelt_option_in_a_file_of_a_user(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    lines = ["from flax import nnx", "from jattn import MultiHeadAttention, PagedAttention"]
    for name in ("sliding_window", "sliding_windw"):
        lines += [f"MultiHeadAttention(4, 16, rngs=nnx.Rngs(0), {name}=3)", f"PagedAttention(4, 16, {name}=3)"]
    (tmp_path / "user.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(tmp_path / "user.py")]
    root = Path(__file__).parents[2]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=300).stdout
    missing = 'No parameter named "sliding_windw"'
    assert re.findall(r"user\.py:(\d+):.* error: (.*) \(", output) == [("5", missing), ("6", missing)]


_HEADS = {"num_heads": 4, "in_features": 12}
LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "MultiHeadAttention": (MultiHeadAttention, {**_HEADS, "decode": False}),
    "GatedDeltaNet": (GatedDeltaNet, {**_HEADS, "num_kv_heads": 2, "key_dim": 8, "value_dim": 6}),
    "KimiDeltaAttention": (KimiDeltaAttention, {**_HEADS, "head_dim": 8}),
    "LightningAttention": (LightningAttention, {**_HEADS, "head_dim": 8}),
    "Mamba2": (Mamba2, {**_HEADS, "head_dim": 8, "state_size": 8}),
    "ShortConv": (ShortConv, {"in_features": 12}),
}


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        *((layer, "in_features") for layer in LAYERS),
        *(("KimiDeltaAttention", name) for name in ("num_heads", "head_dim", "conv_size")),
        *(("GatedDeltaNet", name) for name in ("key_dim", "value_dim", "out_features")),
        ("Mamba2", "state_size"),
        ("MultiHeadAttention", "qkv_features"),
    ],
)
def test_a_size_for_which_xla_would_end_the_process_is_refused(layer, name):
    kind, sizes = LAYERS[layer]
    wanted = "from 2 to 8" if name == "conv_size" else "from 1 to 65536"
    with pytest.raises(InvalidInput, match=f"^{name} is 1000000000; it must be {wanted}"):
        kind(**{**sizes, name: 10**9}, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("value", [None, [[1.0] * 12] * 3, "x", {}], ids=["None", "list", "text", "dict"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_call_without_an_array_is_refused_by_the_name_of_the_input(layer, value):
    kind, sizes = LAYERS[layer]
    module = kind(**sizes, rngs=nnx.Rngs(0))
    with pytest.raises(InvalidInput, match=r"^inputs(_q)? is a \w+; it must be an array \(jnp\.asarray\)\.$"):
        module(value)
    if layer != "MultiHeadAttention":
        with pytest.raises(InvalidInput, match=r"^metadata is a int; use AttentionMetadata\.build"):
            module(jnp.ones((3, 12)), states=jnp.ones(3), metadata=3)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_of_float32_stays_one_where_jax_has_64_bits(layer: str) -> None:
    kind, sizes = LAYERS[layer]
    with jax.enable_x64(True):
        module = kind(**sizes, rngs=nnx.Rngs(0))
        result = jax.eval_shape(module, jnp.ones((1, 3, 12), jnp.float32))
        found = {array.dtype.name for array in jax.tree.leaves(nnx.state(module, nnx.Param))}
    assert (result.dtype, found) == (jnp.float32, {"float32"})
