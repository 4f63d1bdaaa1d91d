"""Adapters that were trained, as folders of PEFT: the loader and PEFT read what was in memory."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file

import jattn
from jattn.llm.load import load_model, save_adapter, save_model
from jattn.llm.load.adapter_state import adapter_of
from jattn.llm.load.adapters import load_adapter
from jattn.llm.load.config import parse_config
from jattn.llm.load.plan import plan_parameters
from jattn.llm.models import MoEConfig, adapter_targets
from tests.support.lora_models import tiny_adapters
from tests.support.tiny_models import tiny_config, tiny_model

CONFIG = tiny_config(num_hidden_layers=2)
MOE = MoEConfig(num_experts=3, num_experts_per_tok=2, intermediate_size=16)
EXPERTS = tiny_config(num_hidden_layers=1, tie_word_embeddings=False, moe=MOE)
_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
#: Two tensors of a layer that has six; pieces of one; experts in one tensor; none joined but keys and values.
RAW = {
    "Qwen3NextForCausalLM": _DELTA | _ROUTED | {"shared_expert_intermediate_size": 8},
    "Phi3ForCausalLM": {"pad_token_id": 0},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "LlamaForCausalLM": {},
}


def config_of(architecture):
    return replace(parse_config({"architectures": [architecture], **_SMALL, **RAW[architecture]}), dtype="float32")


def products(found):
    """The product of each part, of each joined layer: [..., out, in]."""
    added = {}
    for target, (first, second, *_) in found.weights.items():
        first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
        own = [first.T] if target.is_embedding else np.split(first, target.num_slices, axis=-2)
        parts = np.split(second, np.cumsum(target.slices)[:-1], axis=-2)
        added[target] = np.concatenate([b @ a for a, b in zip(own, parts, strict=True)], axis=-2)
    return added


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_a_saved_adapter_is_read_as_the_same_arrays_of_its_dtype(config, dtype, tmp_path, seed):
    config = replace(config, dtype=dtype)
    names = ["proj", "router", "embed_tokens", "lm_head"]
    modules = [target.module for target in adapter_targets(config) if target.module.endswith(tuple(names))]
    adapters = tiny_adapters(config, seed, target_modules=modules, alpha=6.0)
    save_adapter(tmp_path, adapters, config, index=1)
    wanted, found = adapter_of(adapters, config, index=1), load_adapter(tmp_path, config)
    assert (found.rank, found.weights.keys()) == (wanted.rank, wanted.weights.keys())
    for target, weights in wanted.weights.items():
        jax.tree.map(np.testing.assert_array_equal, weights, found.weights[target])
    assert {str(each.dtype) for each in load_file(tmp_path / "adapter_model.safetensors").values()} == {dtype}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("architecture", list(RAW))
def test_layers_that_are_one_in_the_checkpoint_keep_each_products(architecture, tmp_path, seed):
    """Their first matrices lie below each other, in the order of the checkpoint's outputs."""
    config = config_of(architecture)
    adapters = tiny_adapters(config, seed, rank=3)
    save_adapter(tmp_path, adapters, config)
    unused = {plan.path: plan.num_unused for plan in plan_parameters(config)}
    wanted, found = (products(each) for each in (adapter_of(adapters, config), load_adapter(tmp_path, config)))
    assert found.keys() == wanted.keys()
    for target in wanted:
        used = slice(target.out_size - unused[target.kernel])
        np.testing.assert_allclose(found[target][..., used, :], wanted[target][..., used, :], atol=1e-6)


def test_a_state_keeps_its_dtype_and_its_layers(tmp_path, seed):
    generator = np.random.default_rng(seed)
    pair = {"lora_a": (CONFIG.hidden_size, 2), "lora_b": (2, CONFIG.query_size)}
    given = {name: jnp.asarray(generator.normal(size=shape), jnp.float32) for name, shape in pair.items()}
    state = {"layers": {1: {"self_attn": {"q_proj": given}}}}
    save_adapter(tmp_path, state, replace(CONFIG, dtype="bfloat16"), alpha=4.0)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    where = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
    assert tensors.keys() == {f"{where}A.weight", f"{where}B.weight"}
    np.testing.assert_array_equal(tensors[f"{where}A.weight"], given["lora_a"].T)
    np.testing.assert_array_equal(tensors[f"{where}B.weight"], 2 * given["lora_b"].T)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["target_modules"]) == (2, 2, ["q_proj"])


def test_a_folder_with_files_is_replaced_only_if_it_is_told(tmp_path, seed):
    adapters = tiny_adapters(CONFIG, seed, target_modules=["o_proj"])
    save_adapter(tmp_path / "lora", adapters, CONFIG)
    with pytest.raises(jattn.InvalidInput, match=r"folder .*lora' is not empty; overwrite=True replaces"):
        save_adapter(tmp_path / "lora", adapters, CONFIG)
    save_adapter(tmp_path / "lora", adapters, CONFIG, index=1, overwrite=True)
    wanted, found = products(adapter_of(adapters, CONFIG, index=1)), products(load_adapter(tmp_path / "lora", CONFIG))
    jax.tree.map(np.testing.assert_array_equal, list(wanted.values()), list(found.values()))
    (tmp_path / "file").write_text("")
    with pytest.raises(jattn.InvalidInput, match=r"folder .*file' is a file"):
        save_adapter(tmp_path / "file", adapters, CONFIG, overwrite=True)


def test_adapters_that_cannot_be_saved_are_refused_before_anything_is_written(tmp_path, seed):
    adapters = tiny_adapters(CONFIG, seed, target_modules=["o_proj"])
    save, swapped = functools.partial(save_adapter, tmp_path / "lora"), cast("list[Any]", [CONFIG, adapters])
    with pytest.raises(jattn.InvalidInput, match=r"config is a Adapters; the order is save_adapter\(folder, adapter"):
        save(*swapped)
    with pytest.raises(jattn.InvalidInput, match="index is 2"):
        save(adapters, CONFIG, index=2)
    wide = config_of("Phi3ForCausalLM")
    with pytest.raises(jattn.InvalidInput, match=r"the rank of model\..*_proj is \d+; its layers have first matrices"):
        save(tiny_adapters(wide, seed, rank=129), wide)
    module = adapters.layers[0]["self_attn.o_proj"]
    module["lora_b"][...] = module["lora_b"][...].at[0, 0, 0].set(jnp.nan)
    with pytest.raises(jattn.InvalidInput, match=r"has NaN or infinite numbers in .*o_proj"):
        save(adapters, CONFIG)
    module["lora_b"] = nnx.LoRAParam(jnp.zeros(module["lora_b"].shape, jnp.float8_e4m3fn))
    with pytest.raises(jattn.Unsupported, match=r"o_proj has the dtype float8_e4m3fn; matrices"):
        save(adapters, CONFIG)
    pair = {"lora_a": jnp.zeros((CONFIG.hidden_size, 2)), "lora_b": jnp.zeros((2, CONFIG.query_size))}
    with pytest.raises(jattn.InvalidInput, match="adapter is 0 everywhere"):
        save({"layers": {0: {"self_attn": {"q_proj": pair}}}}, CONFIG)
    assert not (tmp_path / "lora").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM", "GptOssForCausalLM"])
def test_peft_has_the_logits_of_a_saved_adapter(architecture, tmp_path, seed):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = config_of(architecture)
    model = tiny_model(config, seed)
    save_model(tmp_path / "base", model, config)
    adapters = tiny_adapters(config, seed, rank=3, alpha=2.0)
    save_adapter(tmp_path / "lora", adapters, config, index=1)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    base = getattr(transformers, architecture).from_pretrained(tmp_path / "base", **options).eval()
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "lora")
    tokens = jnp.arange(1, 9, dtype=jnp.int32)[None]
    batch = adapters.batch(jnp.ones(1, jnp.int32), tokens.size)
    own = jax.nn.log_softmax(
        load_model(tmp_path / "base", with_tokenizer=False)[0].forward_dense(tokens, adapters=batch)
    )
    with torch.no_grad():
        wanted = tuned(torch.tensor(np.asarray(tokens)).long()).logits.log_softmax(-1).numpy()
        with tuned.disable_adapter():
            plain = tuned(torch.tensor(np.asarray(tokens)).long()).logits.log_softmax(-1).numpy()
    assert abs(wanted - plain).max() > 1e-2
    np.testing.assert_allclose(own, wanted, atol=1e-5)
