"""Adapters from folders of PEFT and from memory: the products are PEFT's, and what does not fit is refused by name."""

from __future__ import annotations

import functools
from dataclasses import replace

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
from jattn.llm.load.config import parse_config
from jattn.llm.load.plan import plan_parameters
from jattn.llm.models import BatchAdapters, LoraWeights, MoEConfig, adapter_targets
from tests.support.family_models import CASES, write_checkpoint
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
    for target, (first, second, *_) in found.weights.items():
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


_SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_SMALL |= {"max_position_embeddings": 64}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"]}
_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_KIMI = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "linear_num_heads": 4, "linear_head_dim": 6, "linear_conv_kernel_dim": 4, "num_experts": 4,
    "num_experts_per_token": 2, "moe_intermediate_size": 8, "num_key_value_heads": 4, "num_shared_experts": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "changes", "names"),
    [
        ("Qwen3NextForCausalLM", _DELTA | _ROUTED | {"shared_expert_intermediate_size": 8, "head_dim": 8}, {}),
        ("Qwen3_5ForCausalLM", _DELTA | {"head_dim": 8}, {}),
        ("OlmoHybridForCausalLM", _DELTA, {}),
        ("KimiLinearForCausalLM", _KIMI, {"self_attn.f_": "self_attn.forget_gate.f_", "block_sparse_moe": "mlp"}),
    ],
)
def test_joined_layers_have_the_matrices_of_each_in_their_kernels_order(architecture, changes, names, tmp_path, seed):
    config = parse_config({"architectures": [architecture], **_SMALL, **changes})
    plans = {plan.path: plan for plan in plan_parameters(config) if plan.path[-1] in ("kernel", "embedding")}
    modules = [piece.name.removesuffix(".weight") for plan in plans.values() for piece in plan.pieces]
    tensors = peft_tensors(config, seed, modules=modules)
    # As transformers names its modules.
    spelt = {functools.reduce(lambda x, pair: x.replace(*pair), names.items(), name): name for name in tensors}
    folder = peft_folder(tmp_path, {name: tensors[own] for name, own in spelt.items()}, lora_alpha=4)
    found = load_adapter(folder, config).weights
    assert {target.name for target in found} == {target.name for target in adapter_targets(config)}
    for target, (first, second, *_) in found.items():
        if target.is_embedding or target.num_experts:
            continue
        parts = zip(np.split(first, target.num_slices), np.split(second, np.cumsum(target.slices)[:-1]), strict=True)
        added = np.concatenate([b @ a for a, b in parts])
        plan = plans[target.kernel]
        pairs = [f"base_model.model.{piece.name.removesuffix('.weight')}.lora" for piece in plan.pieces]
        wanted = np.concatenate([tensors[f"{pair}_B.weight"] @ tensors[f"{pair}_A.weight"] for pair in pairs])
        wanted = np.pad(wanted, ((0, plan.num_unused), (0, 0)))
        np.testing.assert_allclose(added, wanted if plan.order is None else wanted[plan.order], atol=1e-6)


def linear_layers(model):
    """The shapes of linear layers and routers of a model of transformers by name, [out, in]."""
    for name, each in model.named_modules():
        if isinstance(each, torch.nn.Linear):
            yield name, each.weight.shape
        elif type(each).__name__ == "Conv1D":
            yield name, each.weight.shape[::-1]
    for name, each in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if name.endswith((".gate.weight", ".router.weight")) and not isinstance(module, torch.nn.Linear):
            yield name.removesuffix(".weight"), each.shape


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", list(CASES))
def test_an_adapter_of_each_linear_layer_of_transformers_is_read(architecture, tmp_path, seed):
    transformers = pytest.importorskip("transformers")
    folder = write_checkpoint(tmp_path / "base", architecture, len(CASES[architecture][1]) - 1, seed)
    model = getattr(transformers, architecture, transformers.AutoModelForCausalLM).from_pretrained(folder)
    tensors = {}
    for name, (out_size, in_size) in linear_layers(model):
        if "per_layer_model" not in name:
            tensors[f"base_model.model.{name}.lora_A.weight"] = np.ones((4, in_size), np.float32)
            tensors[f"base_model.model.{name}.lora_B.weight"] = np.ones((out_size, 4), np.float32)
    config = load_model(folder, with_tokenizer=False, dtype="float32")[0].config
    assert load_adapter(peft_folder(tmp_path / "lora", tensors), config).rank == 4


@pytest.mark.nightly
@pytest.mark.parametrize(
    "architecture",
    [
        "DeepseekV3ForCausalLM",
        "Qwen3NextForCausalLM",
        "KimiLinearForCausalLM",
        "Lfm2ForCausalLM",
        "MiniMaxForCausalLM",
        "BambaForCausalLM",
        "FalconH1ForCausalLM",
        "AfmoeForCausalLM",
        "GlmMoeDsaForCausalLM",
        "Gemma4ForCausalLM",
        "MixtralForCausalLM",
    ],
)
def test_an_adapter_that_peft_writes_has_pefts_logits(architecture, tmp_path, seed):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    variant = len(CASES[architecture][1]) - 1
    folder = write_checkpoint(tmp_path / "base", architecture, variant, seed)
    base = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    modules = dict(base.named_modules())
    names = [name for name, _ in linear_layers(base) if "per_layer_model" not in name]
    linear = {name.rpartition(".")[2] for name in names if isinstance(modules[name], torch.nn.Linear)}
    # Routers are modules of transformers' own.
    routers = {".".join(name.split(".")[3:]) for name in names if not isinstance(modules[name], torch.nn.Linear)}
    config = {"target_modules": sorted(linear), "target_parameters": [f"{name}.weight" for name in sorted(routers)]}
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=3, **config))
    torch.manual_seed(seed)
    for name, each in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(each, 0, 0.08)
    model.save_pretrained(tmp_path / "lora")
    loaded, *_ = load_model(folder, with_tokenizer=False, dtype="float32")
    with torch.no_grad():
        wanted = model(torch.tensor(np.asarray(TOKENS)).long()).logits.log_softmax(-1).numpy()
        with model.disable_adapter():
            plain = model(torch.tensor(np.asarray(TOKENS)).long()).logits.log_softmax(-1).numpy()
    # Norms of small results enlarge the roundings of some bases.
    roundings = abs(jax.nn.log_softmax(dense_logits(loaded)) - plain).max()
    found = logits_with(loaded, load_adapter(tmp_path / "lora", loaded.config))
    np.testing.assert_allclose(jax.nn.log_softmax(found), wanted, atol=1e-5 + 4 * roundings)


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
    options = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "down_proj"]}
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
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'; it may change the base"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga'; it may change the base"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying is True"),
        ({"newer": 3}, "adapter_config.json: newer is 3; this build does not know the key"),
        (
            {"target_modules": ["k_proj", "proj"]},
            r"target_modules leaves out 'model\.layers\.0\.self_attn\.q_proj', of",
        ),
        ({"target_modules": [3]}, r"target_modules is \[3\]; it must be a list of names"),
        ({"exclude_modules": ["q_proj"]}, r"exclude_modules has 'model\.layers\.0\.self_attn\.q_proj', of"),
        ({"layers_to_transform": [1, 2]}, r"layers_to_transform leaves out 'model\.layers\.0\.self_attn\.q_proj', of"),
        ({"layers_to_transform": [0], "layers_pattern": "x"}, "layers_pattern is 'x'"),
        ({"layers_to_transform": -1}, r"layers_to_transform\[0\] is -1"),
        ({"rank_pattern": {"(a+)+$": 3}}, "rank_pattern has "),
        ({"rank_pattern": {"q_proj": 257}}, r"rank_pattern\['q_proj'\] is 257"),
        ({"alpha_pattern": {"q_proj": "x"}}, r"alpha_pattern\['q_proj'\] is 'x'"),
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


def test_keys_that_change_nothing_are_read_over(tmp_path, seed):
    """What PEFT 0.21 writes, and keys of other versions without a value."""
    inert = {
        "fan_in_fan_out": True, "qalora_group_size": 16, "megatron_core": "megatron.core", "lora_dropout": 0.1,
        "loftq_config": {}, "init_lora_weights": "gaussian", "newer": None, "later": False, "layers_pattern": "h",
        "target_modules": ["q_proj", "self_attn.o_proj"], "layers_to_transform": [0, 5], "exclude_modules": ["lm_head"],
    }  # fmt: skip
    folder = peft_folder(tmp_path, peft_tensors(CONFIG, seed, modules=("q_proj", "o_proj")), **inert)
    assert len(load_adapter(folder, CONFIG).weights) == 2


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
        ("gate", ((4, 48), (2, 4)), r"has shape \(2, 4\); the model and r = 4 ask for \(3, 4\)"),
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


def test_an_adapter_of_another_architecture_is_refused_though_its_shapes_fit(tmp_path, seed):
    tensors = peft_tensors(CONFIG, seed, modules=("q_proj",))
    model = replace(CONFIG, architecture="LlamaForCausalLM")
    # GGUF files of Mistral are read as Llama.
    for name in ("LlamaForCausalLM", "WrappedByAProject", "MistralForCausalLM"):
        folder = peft_folder(tmp_path / name, tensors, auto_mapping={"base_model_class": name})
        assert len(load_adapter(folder, model).weights) == 1
    folder = peft_folder(tmp_path, tensors, auto_mapping={"base_model_class": "Qwen3MoeForCausalLM"})
    with pytest.raises(jattn.InvalidInput, match="base_model_class is 'Qwen3MoeForCausalLM'; the model is Llama"):
        load_adapter(folder, model)


@pytest.mark.parametrize(
    "other", [lambda name: name.replace("base_model.model.", ""), lambda name: f"{name[:-7]}.default.weight"]
)
def test_a_matrix_that_occurs_under_two_names_is_refused(other, tmp_path, seed):
    tensors = peft_tensors(CONFIG, seed, modules=("o_proj",))
    both = tensors | {other(name): tensor for name, tensor in tensors.items()}
    with pytest.raises(jattn.InvalidInput, match=r"tensors .* and .* are one layer's; leave one out"):
        load_adapter(peft_folder(tmp_path, both), CONFIG)


def test_quantised_numbers_without_scales_are_no_adapter(tmp_path, seed):
    tensors = peft_tensors(CONFIG, seed, modules=("o_proj",))
    codes = {name: np.ones(tensor.shape, np.uint8) for name, tensor in tensors.items()}
    with pytest.raises(jattn.Unsupported, match=r"has dtype 'U8'; matrices of adapters may be F32, BF16, F16"):
        load_adapter(peft_folder(tmp_path, codes), CONFIG)
