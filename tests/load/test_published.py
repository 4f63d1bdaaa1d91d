"""Folders as they were published: keys and tensors that nothing computes with, and what a user overrides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jattn.llm.load import known_families, load_model, parse_config, save_model
from jattn.llm.load.folder import read_config
from tests.support import encoder_decoders
from tests.support.family_models import CASES, write_checkpoint
from tests.support.tiny_models import dense_logits, reference_bound, write_tiny_model
from torch_core.base.errors import InvalidInput, Unsupported

#: What files of the hub have beside the keys that transformers writes today.
KEYS: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {"max_sequence_length": 2048}),
    ("LlamaForCausalLM", {"activation": "swiglu"}),
    ("LlamaForCausalLM", {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}, "is_llama_config": True}),
    ("LlamaForCausalLM", {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "sep_token_id": 2}),
    ("Gemma2ForCausalLM", {"hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 7}),
    ("Gemma3ForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}),
    ("Phi3ForCausalLM", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}),
    ("CohereForCausalLM", {"model_max_length": 131072}),
    (
        "Starcoder2ForCausalLM",
        {
            "activation_function": "gelu",
            "layer_norm_epsilon": 1e-5,
            "mlp_type": "default",
            "norm_type": "layer_norm",
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
        },
    ),
    ("DeepseekV3ForCausalLM", {"model_type": "kimi_k2"}),
    (
        "Lfm2ForCausalLM",
        {"block_dim": 32, "conv_dim": 32, "num_heads": 4, "block_use_swiglu": True, "use_pos_enc": True},
    ),
    ("BambaForCausalLM", {"attn_rotary_emb": 64, "mamba_d_head": "auto"}),
    ("GraniteMoeHybridForCausalLM", {"init_method": "mup", "normalization_function": "rmsnorm"}),
    ("FalconH1ForCausalLM", {"mamba_use_mlp": True, "mlp_expansion_factor": 8, "mamba_d_head": "auto"}),
    (
        "NemotronHForCausalLM",
        {"hybrid_override_pattern": "M-*-", "layers_block_type": None, "num_hidden_layers": 4, "rms_norm_eps": 1e-5},
    ),
    ("BartForConditionalGeneration", {"num_hidden_layers": 2, "normalize_before": False}),
]


def raw_config(folder: Path) -> dict[str, Any]:
    return read_config(folder)


def write_published(folder: Path, architecture: str, seed: int) -> Path:
    write = write_checkpoint if architecture in CASES else encoder_decoders.write_checkpoint
    return write(folder, architecture, 0, seed)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=24, max_position_embeddings=40)
    transformers.BertModel(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("architecture", "keys"), KEYS, ids=[f"{name}-{next(iter(keys))}" for name, keys in KEYS])
def test_keys_of_published_files_that_nothing_computes_with_are_left_alone(architecture, keys, tmp_path, seed):
    raw = raw_config(write_published(tmp_path, architecture, seed))

    assert parse_config(raw | keys) == parse_config(raw)


def test_one_function_by_its_two_names_is_one_activation(tmp_path, seed):
    raw = raw_config(write_checkpoint(tmp_path, "GPTNeoXForCausalLM", 0, seed))

    assert parse_config(raw | {"hidden_act": "gelu_fast"}) == parse_config(raw | {"hidden_act": "gelu_new"})


def test_an_encoder_with_the_head_of_its_training_is_the_encoder(bert):
    raw = raw_config(bert)

    assert parse_config(raw | {"architectures": ["BertForMaskedLM"]}) == parse_config(raw)


def test_a_minimax_whose_branches_have_different_factors_is_refused(tmp_path, seed):
    raw = raw_config(write_checkpoint(tmp_path, "MiniMaxForCausalLM", 0, seed))

    with pytest.raises(Unsupported, match=r"^config\.json: mlp_beta_factor is 2; this build has one for all branches"):
        parse_config(raw | {"mlp_beta_factor": 2})


def edited(folder: Path, change: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_first_files_of_minimax_have_other_keys_and_no_rates(tmp_path, seed):
    folder = write_checkpoint(tmp_path, "MiniMaxForCausalLM", 1, seed)
    expected, config, _ = load_model(folder, with_tokenizer=False)
    raw = raw_config(folder)
    old = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    for kind, factor in ((kind, factor) for kind in old for factor in ("alpha", "beta")):
        raw[f"layernorm_{old[kind]}_{factor}"] = raw.pop(f"{kind}_{factor}_factor")
    theta = raw.pop("rope_parameters")["rope_theta"]
    del raw["layer_types"]
    raw |= {"architectures": ["MiniMaxText01ForCausalLM"], "model_type": "minimax_text_01", "attn_type_list": [0, 1]}
    raw |= {"postnorm": True, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "rope_theta": theta}
    (folder / "config.json").write_text(json.dumps(raw))
    edited(folder, lambda tensors: [tensors.pop(name) for name in [*tensors] if "slope_rate" in name])

    found, found_config, _ = load_model(folder, with_tokenizer=False)

    assert found_config == config
    assert parse_config(raw | {"rotary_dim": 2}).rotary_dim == 2
    for (path, value), (_, other) in zip(
        *(nnx.to_flat_state(nnx.state(each)) for each in (found, expected)), strict=True
    ):
        np.testing.assert_allclose(value[...], other[...], rtol=2.0**-22 * ("slope_rate" in path), err_msg=str(path))


def published_mimo(**changes: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "head_dim": 12}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 1, "v_head_dim": 6, "num_hidden_layers": 2}
    sizes |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 12, "swa_v_head_dim": 6}
    sizes |= {"n_routed_experts": 6, "num_experts_per_tok": 2, "max_position_embeddings": 128}
    others = {"hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "sliding_window": 6, "sliding_window_size": 6}
    others |= {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "n_shared_experts": None}
    others |= {"rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "rope_scaling": None}
    others |= {"layernorm_epsilon": 1e-5, "routed_scaling_factor": None, "attention_chunk_size": 6}
    names = {"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "auto_map": {}}
    return names | sizes | others | {"attention_value_scale": 0.707} | changes


def test_the_published_spelling_of_mimo_is_that_of_transformers():
    full, local = ({"rope_theta": theta, "partial_rotary_factor": 0.334} for theta in (5e6, 1e4))
    theirs = {name: value for name, value in published_mimo().items() if not name.startswith(("swa_", "add_"))}
    for name in ("hybrid_layer_pattern", "moe_layer_freq", "sliding_window_size", "layernorm_epsilon", "rope_theta"):
        del theirs[name]
    del theirs["partial_rotary_factor"], theirs["attention_chunk_size"]
    theirs |= {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"]}
    theirs |= {"sliding_window": 7, "rope_parameters": {"full_attention": full, "sliding_attention": local}}

    assert parse_config(published_mimo()) == parse_config(theirs)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hybrid_layer_pattern": [0, 2]}, "hybrid_layer_pattern"),
        ({"swa_head_dim": 16}, "swa_head_dim"),
        ({"swa_num_key_value_heads": 1}, "swa_num_key_value_heads"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling"),
    ],
)
def test_a_mimo_of_other_sizes_is_refused_by_its_key(changes, name):
    with pytest.raises((InvalidInput, Unsupported), match=rf"^config\.json: {name} "):
        parse_config(published_mimo(**changes))


def test_norms_by_the_names_of_old_writers_are_read(bert):
    name = "encoder.layer.0.output.LayerNorm.weight"
    edited(bert, lambda tensors: tensors.update({name: np.arange(16, 32, dtype=np.float32)}))
    expected, *_ = load_model(bert, with_tokenizer=False)

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if "LayerNorm." in name]:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(name)

    found, *_ = load_model(edited(bert, rename), with_tokenizer=False)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(expected))


def test_a_head_that_differs_from_the_tied_embedding_is_taken_on_request(tmp_path, seed):
    folder = write_tiny_model(tmp_path, seed, tie_word_embeddings=True)
    edited(folder, lambda tensors: tensors.update({"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}))

    model, *_ = load_model(folder, hf_overrides={"tie_word_embeddings": False})
    assert model.lm_head is not None
    np.testing.assert_array_equal(model.lm_head.kernel[...], 2 * model.embed_tokens.embedding[...].T)


def test_overrides_stand_in_the_place_of_the_files_values(tmp_path, seed):
    folder = write_tiny_model(tmp_path, seed)
    raw = raw_config(folder) | {"zeta": 1}
    (folder / "config.json").write_text(json.dumps(raw))

    with pytest.raises(InvalidInput, match=r"the unknown key 'zeta'; hf_overrides=\{'zeta': None\} loads without"):
        load_model(folder)
    _, config, _ = load_model(folder, hf_overrides={"zeta": None, "rope_theta": 5000.0})
    assert config.rope_theta == 5000.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([1], r"^hf_overrides is \[1\]; it must be a mapping of keys of config\.json to values\.$"),
        ({1: 2}, r"^hf_overrides has the key 1; keys of config\.json are text\.$"),
        ({"rms_norm_eps": "x"}, r"^config\.json: rms_norm_eps is 'x'; "),
    ],
)
def test_wrong_overrides_are_refused_by_name(overrides, message, tmp_path, seed):
    with pytest.raises(InvalidInput, match=message):
        load_model(write_tiny_model(tmp_path, seed), hf_overrides=overrides)


_TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
_TYPES = ["sliding_attention", "full_attention"] * 3 + ["full_attention"]
_SIGHT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WHOLES: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        {
            "text_config": _TEXT | {"sliding_window": 5, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
            "vision_config": _SIGHT,
            "mm_tokens_per_image": 4,
        },
    ),
    "Mistral3ForConditionalGeneration": (
        "Mistral3Config",
        {"text_config": _TEXT | {"model_type": "mistral", "sliding_window": None}, "vision_config": _SIGHT},
    ),
    "Gemma4ForConditionalGeneration": (
        "Gemma4Config",
        {
            "text_config": _TEXT
            | {
                "sliding_window": 5,
                "global_head_dim": 16,
                "num_kv_shared_layers": 1,
                "use_bidirectional_attention": "vision",
            }
            | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 99, "layer_types": _TYPES},
            "vision_config": _SIGHT | {"num_key_value_heads": 2, "head_dim": 8},
        },
    ),
}


@pytest.fixture(params=WHOLES)
def whole(request: pytest.FixtureRequest, tmp_path: Path, seed: int) -> tuple[Path, np.ndarray, np.ndarray]:
    """A model that reads pictures, and its logits of a text: in float64 and in float32."""
    import torch
    import transformers

    name, options = WHOLES[request.param]
    options = {**options, "image_token_index": 98, "eos_token_id": [1, 7]}
    torch.manual_seed(seed)
    model = getattr(transformers, request.param)(getattr(transformers, name)(**options)).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            centre = 1.0 if "norm" in path and "Mistral" in request.param else 0.0
            parameter.copy_(centre + 0.15 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path)
    ids = torch.arange(12)[None] + 3
    with torch.no_grad():
        single, double = model(input_ids=ids).logits[0], model.double()(input_ids=ids).logits[0]
    return tmp_path, double.numpy(), single.numpy()


@pytest.mark.parametrize("spelling", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_one_that_reads_pictures_is_read_alone(whole, spelling):
    folder, double, single = whole

    def spell(tensors: dict[str, np.ndarray]) -> None:
        for name in [*tensors]:
            inner = name.removeprefix("language_model.")
            if inner != name and spelling == "model.language_model.":
                tensors[inner.replace("model.", spelling, 1)] = tensors.pop(name)

    model, config, _ = load_model(edited(folder, spell), with_tokenizer=False)

    found = dense_logits(model, np.arange(12) + 3)
    assert np.abs(found - double).max() <= reference_bound(double, single)
    assert config.eos_token_ids == (1, 7)


def test_a_whole_without_a_language_model_of_the_family_is_refused(whole):
    raw = raw_config(whole[0])
    architecture = raw["architectures"][0]

    with pytest.raises(InvalidInput, match=rf"^config\.json: text_config is None; {architecture} needs an object\.$"):
        parse_config({key: value for key, value in raw.items() if key != "text_config"})
    with pytest.raises(InvalidInput, match=r"^config\.json: text_config\.model_type is 'other'; this build reads the"):
        parse_config(raw | {"text_config": raw["text_config"] | {"model_type": "other"}})


@pytest.mark.parametrize("kind", ["mistral", "ministral3", "mistral4"])
def test_a_whole_is_read_as_the_family_of_its_text_config(kind):
    text = {key: value for key, value in _TEXT.items() if key != "num_key_value_heads"}
    raw = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    found = parse_config(raw | {"text_config": text | {"model_type": kind}}).architecture
    assert known_families()[found].model_type == kind


def test_a_t5_whose_file_has_the_decoders_embedding_alone_is_read(tmp_path, seed):
    """MADLAD-400's files."""
    folder = write_published(tmp_path, "T5ForConditionalGeneration", seed)
    expected, *_ = load_model(folder, with_tokenizer=False)
    name = "decoder.embed_tokens.weight"
    folder = edited(folder, lambda tensors: tensors.update({name: tensors.pop("shared.weight")}))
    found, *_ = load_model(folder, with_tokenizer=False)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(expected))


def test_sizes_that_a_published_text_config_leaves_out_are_those_of_transformers():
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": {},
    }
    config = parse_config(raw)
    sizes = (config.vocab_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert sizes == (262208, 8, 4, 256)


def test_a_x_k1s_files_have_no_corrections_and_norms_that_are_not_used(tmp_path, seed):
    folder = write_checkpoint(tmp_path / "theirs", "AXK1ForCausalLM", 0, seed)
    tensors = load_file(folder / "model.safetensors")
    assert "model.layers.1.post_mlp_layernorm.weight" in tensors
    tensors = {name: np.zeros_like(each) if "correction" in name else each for name, each in tensors.items()}
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"mlp_layer_types": None, "moe_layer_freq": 1}
    (folder / "config.json").write_text(json.dumps(raw))
    cut = {name: each for name, each in tensors.items() if "correction" not in name}
    cut["model.layers.0.post_mlp_layernorm.weight"] = np.ones(32, np.float32)
    models = []
    for each in (tensors, cut):
        save_file(each, folder / "model.safetensors", {"format": "pt"})
        models.append(load_model(folder, with_tokenizer=False)[0])
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(model) for model in models))


@pytest.mark.parametrize("name", ["logits_soft_cap", "logits_softcap"])
def test_the_first_names_of_nanochats_cap_are_read(name, tmp_path, seed):
    raw = json.loads((write_checkpoint(tmp_path, "NanoChatForCausalLM", 0, seed) / "config.json").read_text())
    assert raw["final_logit_softcapping"] is None
    assert parse_config(raw | {name: 7.0}).final_logit_softcapping == 7.0


def test_norms_that_were_trained_are_not_saved_where_files_have_none(tmp_path, seed):
    folder = write_checkpoint(tmp_path / "theirs", "NanoChatForCausalLM", 0, seed)
    model, config, _ = load_model(folder, with_tokenizer=False)
    assert model.norm is not None
    model.norm.weight[...] = model.norm.weight[...].at[3].set(1.5)
    with pytest.raises(Unsupported, match=r"^norm\.weight is not 1 everywhere; files of NanoChatForCausalLM have no"):
        save_model(tmp_path / "ours", model, config)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("architecture", "key", "value", "message"),
    [
        (
            "GPTNeoForCausalLM",
            "attention_types",
            [[["global"], 10**9]],
            r"attention_types is .*; it must have 'global' or",
        ),
        (
            "GPTNeoForCausalLM",
            "attention_types",
            [["local"]],
            "attention_types is .*; it must have 'global' or 'local'",
        ),
        ("GPTNeoForCausalLM", "attention_types", [[["other"], 2]], "attention_types is .* for each of the 2 layers"),
        (
            "OPTForCausalLM",
            "word_embed_proj_dim",
            16,
            r"word_embed_proj_dim is 16; this build has the hidden_size \(32",
        ),
        (
            "OPTForCausalLM",
            "layer_norm_elementwise_affine",
            1,
            "layer_norm_elementwise_affine is 1; it must be true or false",
        ),
        ("GPTJForCausalLM", "rotary_dim", "x", "rotary_dim is 'x'"),
        ("MiniMaxM2ForCausalLM", "rotary_dim", "x", "rotary_dim is 'x'"),
        ("MiniMaxForCausalLM", "rotary_dim", [4], "rotary_dim is .4."),
        ("GPTBigCodeForCausalLM", "multi_query", 1, "multi_query is 1; it must be true or false"),
    ],
)
def test_values_of_older_families_are_refused_by_their_key(architecture, key, value, message, tmp_path, seed):
    folder = write_checkpoint(tmp_path, architecture, 0, seed, num_hidden_layers=2)
    raw = json.loads((folder / "config.json").read_text())
    with pytest.raises((InvalidInput, Unsupported), match=f"^config.json: {message}"):
        parse_config(raw | {key: value})
