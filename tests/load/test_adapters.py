"""Adapters from folders of PEFT and from memory: the products are PEFT's, and what does not fit is refused by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file

import jattn
from jattn.llm.load import load_model, save_model
from jattn.llm.load.adapter_state import adapter_of
from jattn.llm.load.adapters import load_adapter
from jattn.llm.models import BatchAdapters, LoraWeights, MoEConfig
from tests.support.lora_models import (
    PROJECTIONS,
    fused_tensors,
    peft_folder,
    peft_tensors,
)
from tests.support.tiny_models import tiny_config, tiny_model

CONFIG = tiny_config(num_hidden_layers=1)
MOE = MoEConfig(num_experts=3, num_experts_per_tok=2, intermediate_size=16)
EXPERTS = tiny_config(num_hidden_layers=1, tie_word_embeddings=False, moe=MOE)
TOKENS = jnp.arange(1, 9, dtype=jnp.int32)[None]


def logits_with(model, found):
    """The logits of a batch of one sequence with an adapter."""
    layers, outside = tuple({} for _ in range(model.config.num_hidden_layers)), {}
    for target, (first, second) in found.weights.items():
        weights = LoraWeights(jnp.asarray(first)[None], jnp.asarray(second)[None])
        (outside if target.layer is None else layers[target.layer])[target.module] = weights
    adapters = BatchAdapters.of(layers, outside, jnp.zeros(TOKENS.size, jnp.int32), 1)
    return dense_logits(model, adapters)


@nnx.jit
def dense_logits(model, adapters=None):
    return model.forward_dense(TOKENS, adapters=adapters)


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_a_folder_of_peft_has_the_logits_of_pefts_merged_weights(config, tmp_path, seed):
    model = tiny_model(config, seed)
    save_model(tmp_path / "base", model, config)
    modules = (*PROJECTIONS, "embed_tokens", "lm_head", "experts.0.gate_proj", "experts.1.up_proj", "1.down_proj")
    tensors = peft_tensors(config, seed, modules=modules, ranks={"v_proj": 2, "mlp.up_proj": 7, "lm_head": 7})
    # PEFT saves the embedding beside its adapter.
    vocabulary = np.zeros((config.vocab_size, config.hidden_size), np.float32)
    tensors["base_model.model.model.embed_tokens.base_layer.weight"] = vocabulary
    ranks = {"v_proj": 2, "mlp.up_proj": 7, "lm_head": 7}
    options = {"rank_pattern": ranks, "alpha_pattern": {"o_proj": 3}, "use_rslora": True}
    found = load_adapter(peft_folder(tmp_path / "lora", tensors, **options), config)
    weights = {
        name: torch.tensor(each).double() for name, each in load_file(tmp_path / "base/model.safetensors").items()
    }
    for name in weights:
        module = name.removesuffix(".weight")
        start = f"base_model.model.{module}.lora_"
        pair = [torch.tensor(each).double() for key, each in sorted(tensors.items()) if key.startswith(start)]
        if pair:
            lora_a, lora_b = pair
            # As get_delta_weight of peft.tuners.lora.Linear and Embedding computes it.
            scaling = (3 if module.endswith("o_proj") else 8) / lora_a.shape[0] ** 0.5
            added = (lora_b @ lora_a) * scaling
            weights[name] += added.T if module.endswith("embed_tokens") else added
    save_file({name: each.float().numpy() for name, each in weights.items()}, tmp_path / "base/model.safetensors")
    merged, *_ = load_model(tmp_path / "base", with_tokenizer=False)
    np.testing.assert_allclose(
        jax.nn.log_softmax(logits_with(model, found)), jax.nn.log_softmax(dense_logits(merged)), atol=1e-5
    )
    assert found.rank == 7


@pytest.mark.parametrize("names", ["wrapped", "named"])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_parameter_of_all_experts_has_the_matrices_of_each(names, swapped, tmp_path, seed):
    tensors = peft_tensors(EXPERTS, seed, modules=[f"{each}_proj" for each in ("gate", "up", "down")])
    for name in tensors:
        # Of a parameter, gate and up have one first matrix.
        if "gate_proj.lora_A" in name:
            tensors[name.replace("gate", "up")] = tensors[name]
    where, fused = "base_model.model.model.layers.0.mlp.experts", fused_tensors(EXPERTS, tensors, swapped=swapped)
    spelt = {"wrapped": (".base_layer", ""), "named": (".gate_up_proj", ".down_proj")}[names]
    joined = {
        f"{where}{end}.lora_{part}.weight": matrix
        for end, pair in zip(spelt, fused.values(), strict=True)
        for part, matrix in zip("AB", pair, strict=True)
    }
    options = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    wanted = load_adapter(peft_folder(tmp_path / "apart", tensors), EXPERTS)
    found = load_adapter(peft_folder(tmp_path / "fused", joined, **options), EXPERTS)
    assert found.weights.keys() == wanted.weights.keys()
    for target, weights in wanted.weights.items():
        jax.tree.map(np.testing.assert_array_equal, weights, found.weights[target])


def test_layers_that_a_folder_leaves_out_stay_as_they_are(tmp_path, seed):
    found = load_adapter(peft_folder(tmp_path, peft_tensors(CONFIG, seed, modules=("q_proj", "v_proj"))), CONFIG)
    (target,), (weights,) = found.weights, found.weights.values()
    assert target.module == "self_attn.qkv_proj"
    keys = slice(CONFIG.query_size, CONFIG.query_size + CONFIG.key_value_size)
    assert not weights.lora_b[keys].any()
    assert weights.lora_b[keys.stop :].any()


@pytest.mark.parametrize(
    ("path", "names", "heads", "leading"),
    [
        # nnx.LoRA around a projection; qwix on an einsum of tunix's; SkyRL-tx's, for several adapters.
        (("model", "layers", 0, "self_attn", "q_proj"), ("lora_a", "lora_b"), False, ()),
        (("layers", 0, "attn", "q_proj"), ("w_lora_a", "w_lora_b"), True, ()),
        (("model", "layers", 0, "self_attn", "q_proj"), ("lora_A", "lora_B"), False, (3,)),
    ],
    ids=["nnx", "qwix", "skyrl"],
)
def test_states_of_other_projects_are_read_by_name_and_shape(path, names, heads, leading, seed):
    generator = np.random.default_rng(seed)
    first = generator.normal(size=(*leading, CONFIG.hidden_size, 2)).astype(np.float32)
    second = generator.normal(size=(*leading, 2, CONFIG.query_size)).astype(np.float32)
    given = second.reshape(*leading, 2, CONFIG.num_attention_heads, CONFIG.head_dim) if heads else second
    state = {names[0]: jnp.asarray(first), names[1]: jnp.asarray(given)}
    for key in reversed(path):
        state = {key: state}
    found = adapter_of(state, CONFIG, alpha=4.0, index=len(leading))
    ((target, weights),) = found.weights.items()
    own = (first[1], second[1]) if leading else (first, second)
    assert target.module == "self_attn.qkv_proj"
    np.testing.assert_array_equal(weights.lora_a[:2], own[0].T)
    np.testing.assert_array_equal(weights.lora_b[: CONFIG.query_size], 2 * own[1].T)


def test_states_have_experts_and_embeddings(seed):
    generator = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(generator.normal(size=shape), jnp.float32)  # noqa: E731
    experts, tokens = (draw(5, 3, 48, 2), draw(5, 3, 2, 32)), (draw(EXPERTS.vocab_size, 2), draw(2, 48))
    state = {
        "model": {"layers": {0: {"moe": {"gate_up_proj": dict(zip(("lora_A", "lora_B"), experts, strict=True))}}}},
        "embed_tokens": dict(zip(("lora_a", "lora_b"), tokens, strict=True)),
    }
    found = {target.module: weights for target, weights in adapter_of(state, EXPERTS, index=4).weights.items()}
    for part, matrix in enumerate(experts):
        own = found["moe.gate_up_proj"][part]
        halves = np.split(own, 2, axis=1) if part == 0 else [own]
        for each in halves:
            np.testing.assert_array_equal(each, matrix[4].swapaxes(1, 2))
    np.testing.assert_array_equal(found["embed_tokens"].lora_a, tokens[0])
    np.testing.assert_array_equal(found["embed_tokens"].lora_b, tokens[1].T)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"peft_type": "LOHA"}, "adapter_config.json: peft_type is 'LOHA'; this build reads LORA"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'; it changes the base"),
        ({"rank_pattern": {"(a+)+$": 3}}, "rank_pattern has "),
        ({"r": 0}, "adapter_config.json: r is 0; it must be"),
        ({"r": 257}, "r is 257"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
        ({"target_parameters": "experts"}, "target_parameters is 'experts'; it must be a list of names"),
        ({"r": 3}, r"q_proj.lora_A.weight' has shape \(4, 48\); the model and r = 3 ask for \(3, 48\)"),
    ],
)
def test_configs_that_are_not_computed_are_refused_by_name(changes, text, tmp_path, seed):
    folder = peft_folder(tmp_path, peft_tensors(CONFIG, seed, modules=("q_proj",)), **changes)
    with pytest.raises((jattn.InvalidInput, jattn.Unsupported), match=text):
        load_adapter(folder, CONFIG)


ROW = np.zeros((4, 48), np.float32)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight", "is of layer 1; the model has 1"),
        ("base_model.model.lm_head.lora_A.weight", r"has shape \(4, 48\); the model and r = 4 ask for \(257, 4\)"),
        ("base_model.model.lm_head.lora_embedding_A", "'lm_head' has no lora_A.weight, which PEFT gives it"),
        ("base_model.model.model.embed_tokens.lora_A.weight", "has no lora_embedding_A, which PEFT gives it"),
        ("base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight", "is no linear layer of the model"),
        ("base_model.model.model.layers.0.mlp.experts.lora_A.weight", "is no linear layer of the model"),
        ("base_model.model.lm_head.base_layer.weight", r"has shape \(4, 48\); the model's is \(257, 48\)"),
        (
            "base_model.model.model.layers.0.mlp.c_fc.lora_A.weight",
            "is no linear layer of the model; it has down_",
        ),
        ("model.layers.0.self_attn.q_proj.weight", "is none of an adapter's"),
    ],
)
def test_tensors_of_other_layers_are_refused_by_name(name, text, tmp_path):
    tensors = {name: ROW, name.replace("_A", "_B"): ROW}
    with pytest.raises((jattn.InvalidInput, jattn.Unsupported), match=text):
        load_adapter(peft_folder(tmp_path, tensors), CONFIG)


def test_half_an_adapter_numbers_that_are_not_finite_and_pickles_are_refused(tmp_path, seed):
    tensors = peft_tensors(CONFIG, seed, modules=("o_proj",))
    first, second = sorted(tensors)
    with pytest.raises(jattn.InvalidInput, match="has lora_A alone"):
        load_adapter(peft_folder(tmp_path / "half", {first: tensors[first]}), CONFIG)
    broken = tensors | {second: np.full_like(tensors[second], np.nan)}
    with pytest.raises(jattn.InvalidInput, match=r"has NaN or infinite numbers in .*o_proj\.lora_B"):
        load_adapter(peft_folder(tmp_path / "nan", broken), CONFIG)
    folder = peft_folder(tmp_path / "pickle", tensors)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(jattn.InvalidInput, match=r"adapter_model\.bin is a pickle"):
        load_adapter(folder, CONFIG)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(jattn.InvalidInput, match=r"the folder has no adapter_model\.safetensors"):
        load_adapter(folder, CONFIG)


@pytest.mark.parametrize(
    ("name", "shapes", "text"),
    [
        ("experts.3.up_proj", ((4, 48), (16, 4)), "is no linear layer of the model"),
        ("experts.2.up_proj", ((4, 48), (17, 4)), r"has shape \(17, 4\); the model and r = 4 ask for \(16, 4\)"),
        ("experts", ((16, 48), (32, 16)), r"has shape \(16, 48\); the model and r = 4 ask for \(12, 48\)"),
        ("experts.base_layer.base_layer.gate_proj", ((4, 48), (16, 4)), "is no linear layer of the model"),
        ("gate", ((4, 48), (3, 4)), "is a router or a gate, which have no adapters here; experts have"),
    ],
)
def test_experts_that_do_not_fit_are_refused_by_name(name, shapes, text, tmp_path):
    where = f"base_model.model.model.layers.0.mlp.{name}"
    tensors = {f"{where}.lora_{part}.weight": np.zeros(shape) for part, shape in zip("AB", shapes, strict=True)}
    with pytest.raises((jattn.InvalidInput, jattn.Unsupported), match=text):
        load_adapter(peft_folder(tmp_path, tensors), EXPERTS)


def test_a_layer_that_occurs_twice_is_refused(tmp_path, seed):
    tensors = peft_tensors(EXPERTS, seed, modules=[f"{each}_proj" for each in ("gate", "up", "down")])
    where, (first, second) = "base_model.model.model.layers.0.mlp.experts", fused_tensors(EXPERTS, tensors)["down_proj"]
    both = tensors | {f"{where}.lora_A.weight": first, f"{where}.lora_B.weight": second}
    with pytest.raises(jattn.InvalidInput, match=r"adapter has matrices of layers\.0\.moe\.down_proj twice"):
        load_adapter(peft_folder(tmp_path, both), EXPERTS)


def test_an_adapter_of_a_wider_model_is_refused(tmp_path, seed):
    folder = peft_folder(tmp_path, peft_tensors(tiny_config(hidden_size=64, num_hidden_layers=1), seed))
    with pytest.raises(jattn.InvalidInput, match=r"has shape .*; the model and r = 4 ask for"):
        load_adapter(folder, CONFIG)
