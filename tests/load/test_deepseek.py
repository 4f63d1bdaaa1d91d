"""DeepSeek's folders as they lie on the hub: sizes, what is read of them, and what keeps its dtype."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jattn.llm.load import load_model, parse_config, render_config, save_model
from jattn.llm.models import num_parameters
from tests.support.family_models import reference_logits, write_checkpoint
from tests.support.tiny_models import dense_logits, reference_bound
from torch_core.base.errors import InvalidInput, Unsupported

_COMMON: dict[str, Any] = {
    "attention_bias": False, "ep_size": 1, "hidden_act": "silu", "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_layer_freq": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 10000, "v_head_dim": 128,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "auto_map": {"AutoConfig": "configuration.Config"},
}  # fmt: skip
_YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
V2_LITE = _COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "first_k_dense_replace": 1, "q_lora_rank": None, "norm_topk_prob": False,
    "scoring_func": "softmax", "seq_aux": True, "aux_loss_alpha": 0.001, "routed_scaling_factor": 1.0,
    "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
V3 = _COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "topk_method": "noaux_tc", "first_k_dense_replace": 3, "q_lora_rank": 1536, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5,
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip


@pytest.mark.parametrize(("raw", "count"), [(V2_LITE, 15_706_484_224), (V3, 671_026_419_200)], ids=["V2-Lite", "V3"])
def test_a_published_config_has_the_published_number_of_parameters(raw, count):
    assert num_parameters(parse_config(raw)) == count


def test_an_indexer_is_what_v32_has_more_than_v3():
    raw = V3 | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_n_heads": 64,
                "index_head_dim": 128, "index_topk": 2048}  # fmt: skip
    layer = 1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128
    assert num_parameters(parse_config(raw)) == num_parameters(parse_config(V3)) + 61 * layer
    for kind in ("indexed_attention", "deepseek_sparse_attention"):
        assert parse_config(raw | {"layer_types": [kind] * 61}) == parse_config(raw)
    assert parse_config(raw | {"mlp_layer_types": ["sparse"] * 61}).is_sparse(0)
    with pytest.raises(InvalidInput, match="q_lora_rank is None; an indexer's queries"):
        parse_config(raw | {"q_lora_rank": None})


GLM5 = {name: value for name, value in V3.items() if name not in ("auto_map", "quantization_config")}
GLM5 |= {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 6}


GLM5_2: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829], "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "head_dim": 64, "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
    "index_topk_freq": 4, "index_skip_topk_offset": 3, "index_share_for_mtp_iteration": True,
    "indexer_rope_interleave": True, "initializer_range": 0.02, "intermediate_size": 12288, "kv_lora_rank": 512,
    "max_position_embeddings": 202752, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "moe_router_dtype": "float32", "model_type": "glm_moe_dsa", "n_group": 1, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 78, "num_key_value_heads": 64, "num_nextn_predict_layers": 1, "pad_token_id": 154820,
    "pretraining_tp": 1, "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_interleave": True, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "transformers_version": "5.0.2.dev0", "use_cache": True, "v_head_dim": 256,
    "vocab_size": 154880,
}  # fmt: skip


def test_the_keys_of_a_published_glm5_are_read():
    config = parse_config(GLM5_2)
    assert config.index_layers[:6] == (0, 1, 2, 6, 10, 14)
    with pytest.raises(Unsupported, match="indexer_rope_interleave is False; this build has true"):
        parse_config(GLM5_2 | {"indexer_rope_interleave": False})


@pytest.mark.parametrize(
    ("keys", "shared"),
    [
        ({}, ()),
        ({"index_topk_freq": 0, "index_skip_topk_offset": 0}, ()),
        ({"index_topk_freq": 3}, (2, 3, 5)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 4}, (4,)),
        ({"index_topk_freq": 3, "index_topk_pattern": "FFSFSS"}, (2, 4, 5)),
        ({"index_topk_pattern": "FFFFFF", "indexer_types": ["full", *["shared"] * 5]}, (1, 2, 3, 4, 5)),
    ],
    ids=str,
)
def test_glm5s_layers_share_the_choice_of_an_indexer_as_transformers_reads_it(keys, shared):
    transformers = pytest.importorskip("transformers")
    config = parse_config(GLM5 | keys)
    assert set(range(6)) - {*config.index_layers} == {*shared}
    assert parse_config(render_config(config, dtype="bfloat16")) == config
    kinds = transformers.GlmMoeDsaConfig(num_hidden_layers=6, **keys).indexer_types
    assert tuple(layer for layer, kind in enumerate(kinds) if kind == "shared") == shared


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"index_topk_pattern": "FFFFF"}, "index_topk_pattern is 'FFFFF'; it must have 'full' or 'shared' for each"),
        ({"index_topk_pattern": 3}, "index_topk_pattern is 3; "),
        ({"indexer_types": "full"}, "indexer_types is 'full'; it must have"),
        ({"indexer_types": [["full"]] * 6}, "indexer_types is "),
        ({"index_topk_pattern": "SFFFFF"}, "index_topk_pattern is 'SFFFFF'; the first layer has an indexer"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 0}, "index_skip_topk_offset is 0; the first layer has an"),
        ({"index_topk_freq": "x"}, "index_topk_freq is 'x'; it must be an int"),
    ],
    ids=str,
)
def test_layers_without_a_choice_and_other_kinds_are_refused_by_their_key(keys, message):
    with pytest.raises(InvalidInput, match=f"^config.json: {message}"):
        parse_config(GLM5 | keys)


def test_groups_mean_nothing_where_experts_are_chosen_greedily():
    moe = parse_config(V2_LITE | {"n_group": 8, "topk_group": 3}).moe
    assert moe is not None
    assert (moe.n_group, moe.topk_group) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "top"}, "config.json: topk_method is 'top'; this build has greedy and group_limited_greedy."),
        ({"scoring_func": "sigmoid"}, "config.json: scoring_func is 'sigmoid'; this build has 'softmax'."),
        ({"moe_layer_freq": 2}, "config.json: moe_layer_freq is 2; this build has 1."),
    ],
    ids=str,
)
def test_routing_of_another_kind_is_unsupported(changes, message):
    with pytest.raises(Unsupported) as error:
        parse_config(V2_LITE | changes)
    assert str(error.value) == message


def test_the_bias_that_corrects_scores_is_float32_in_models_and_files_of_fewer_bits(tmp_path, seed):
    folder = write_checkpoint(tmp_path / "theirs", "DeepseekV3ForCausalLM", 1, seed)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    theirs = safetensors.numpy.load((folder / "model.safetensors").read_bytes())[name]
    model, config, _ = load_model(folder, dtype="float16", with_tokenizer=False)
    save_model(tmp_path / "ours", model, config)
    ours = safetensors.numpy.load((tmp_path / "ours" / "model.safetensors").read_bytes())

    assert model.layers[1].moe.router.kernel.dtype == jnp.float16
    np.testing.assert_array_equal(ours[name], theirs, strict=True)


@pytest.mark.parametrize("layer", [2, 61])
def test_the_layer_that_predicts_a_second_token_is_not_read(layer, tmp_path, seed):
    folder = write_checkpoint(tmp_path, "DeepseekV3ForCausalLM", 0, seed)
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load(file.read_bytes())
    tensors[f"model.layers.{layer}.eh_proj.weight"] = np.ones((4, 4), np.float32)
    file.write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1

    assert load_model(folder, with_tokenizer=False)[1].num_hidden_layers == 2


@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_dense_sequences_have_the_logits_of_transformers(architecture, tmp_path, seed):
    folder = write_checkpoint(tmp_path, architecture, 0, seed)
    tokens = np.random.default_rng(seed).integers(0, 99, 24)
    exact, same_dtype = reference_logits(folder, tokens[None])
    found = dense_logits(load_model(folder, with_tokenizer=False)[0], tokens)
    assert np.abs(found - exact[0]).max() <= reference_bound(exact, same_dtype)
