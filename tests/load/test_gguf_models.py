"""Models in GGUF files: the same config and parameters as those of the checkpoint that the file was made from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jattn.cli import main
from jattn.llm.load import load_generation_defaults, load_model, parse_config, save_model
from jattn.llm.load.source import open_source
from jattn.llm.testing import compare_with_torch
from tests.load.test_gguf_tokenizer import bpe
from tests.support import family_models
from tests.support.gguf_files import ARCHITECTURES, Packed, gguf_of_checkpoint, write_gguf
from torch_core.base.errors import InvalidInput, Unsupported

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
#: The options of each family that a GGUF file can say.
OPTIONS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16},
    "MistralForCausalLM": {"sliding_window": None},
    "MixtralForCausalLM": {"num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
    "GraniteForCausalLM": family_models.CASES["GraniteForCausalLM"][1][1],
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 16},
    "Qwen2MoeForCausalLM": _EXPERTS | {"shared_expert_intermediate_size": 40},
    "Qwen3MoeForCausalLM": _EXPERTS | {"head_dim": 8, "norm_topk_prob": True},
    "GemmaForCausalLM": {"head_dim": 16},
    "Gemma2ForCausalLM": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 7},
    "Gemma3ForCausalLM": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 7},
    "Phi3ForCausalLM": {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0}},
    "GPT2LMHeadModel": {},
    "Starcoder2ForCausalLM": {},
}


def parameters(model: nnx.Module) -> dict[Any, np.ndarray]:
    return {path: np.asarray(value[...]) for path, value in nnx.to_flat_state(nnx.state(model))}


def written_as_both(tmp_path: Path, architecture: str, seed: int, monkeypatch: Any, **more: Any) -> tuple[Path, Path]:
    name, _ = family_models.CASES[architecture]
    monkeypatch.setitem(family_models.CASES, architecture, (name, [OPTIONS[architecture]]))
    folder = family_models.write_checkpoint(tmp_path / "folder", architecture, 0, seed, num_hidden_layers=1)
    return folder, gguf_of_checkpoint(folder, tmp_path / "x.gguf", **more)


def test_every_family_with_a_spelling_is_tested():
    assert set(OPTIONS) == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", OPTIONS)
def test_a_file_gives_the_config_and_the_parameters_of_its_checkpoint(architecture, tmp_path, seed, monkeypatch):
    folder, file = written_as_both(tmp_path, architecture, seed, monkeypatch)
    theirs, config, _ = load_model(folder, with_tokenizer=False)
    ours, found, _ = load_model(file, with_tokenizer=False)
    tokens = {"bos_token_id": None, "eos_token_ids": ()}
    assert dataclasses.replace(found, **tokens) == dataclasses.replace(config, **tokens)
    expected, values = parameters(theirs), parameters(ours)
    assert expected.keys() == values.keys()
    for path, value in expected.items():
        # The file has a Gemma norm's weight plus 1, rounded to float32.
        bound = 2.0**-23 if "Gemma" in architecture and path[-1] == "weight" else 0
        np.testing.assert_allclose(values[path], value, rtol=0, atol=bound, err_msg=str(path))


def sizes(arch: str = "llama", **more: Any) -> dict[str, Any]:
    names = {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32}
    names |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in names.items()} | more


def parsed(tmp_path: Path, metadata: dict[str, Any], **tensors: Any) -> Any:
    named = {"token_embd.weight": np.zeros((99, 32), "f4")} | {f"{key}.weight": value for key, value in tensors.items()}
    source = open_source(write_gguf(tmp_path / "x.gguf", metadata, named))
    return source.parse(source.raw_config({}))


def llama3_factors(factor: float, first: int = 8192) -> np.ndarray:
    """As llama.cpp's converter has them, for heads of 8 and a base of 500000."""
    factors = []
    for pair in range(4):
        wavelength = 2 * np.pi * 5e5 ** (pair / 4)
        smooth = (first / wavelength - 1) / 3
        blended = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1 if wavelength < first / 4 else factor if wavelength > first else blended)
    return np.array(factors, "f4")


def test_factors_of_frequencies_are_llama_3_1s_scaling(tmp_path):
    metadata = sizes() | {"llama.rope.freq_base": 500000.0}
    scaling = parsed(tmp_path, metadata, rope_freqs=llama3_factors(8.0)).rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings) == ("llama3", 8.0, 8192)
    assert parsed(tmp_path, metadata, rope_freqs=np.ones(4, "f4")).rope_scaling is None
    with pytest.raises(Unsupported, match=r"rope_freqs.weight' has other factors"):
        parsed(tmp_path, metadata, rope_freqs=llama3_factors(8.0, first=64))


def test_tensors_of_factors_are_longrope(tmp_path):
    long, short = np.array([1.5, 2, 3, 4], "f4"), np.array([1, 1.1, 1.2, 1.3], "f4")
    metadata = sizes("phi3") | {"phi3.rope.scaling.original_context_length": 32}
    scaling = parsed(tmp_path, metadata, rope_factors_long=long, rope_factors_short=short).rope_scaling
    assert (scaling.rope_type, scaling.long_factor, scaling.short_factor) == (
        "longrope", (1.5, 2.0, 3.0, 4.0), (1.0, 1.1, 1.2, 1.3)
    )  # fmt: skip
    with pytest.raises(InvalidInput, match=r"rope_factors_short.weight' is missing"):
        parsed(tmp_path, metadata, rope_factors_long=long)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        ({"type": "none", "factor": 4.0}, None),
    ],
)
def test_keys_of_scaling_are_read(keys, expected, tmp_path):
    metadata = sizes("qwen2") | {f"qwen2.rope.scaling.{name}": value for name, value in keys.items()}
    scaling = parsed(tmp_path, metadata).rope_scaling
    assert scaling == expected or {name: getattr(scaling, name) for name in expected} == expected


def test_layers_have_their_windows(tmp_path):
    metadata = sizes("gemma3") | {"gemma3.attention.sliding_window": 5, "gemma3.block_count": 2}
    assert parsed(tmp_path, metadata).sliding_window == 5
    metadata["gemma3.attention.sliding_window_pattern"] = [True, False]
    assert parsed(tmp_path, metadata).layer_windows == (5, None)
    metadata["gemma3.attention.sliding_window_pattern"] = 1
    assert parsed(tmp_path, metadata).layer_windows == ()


def test_quantised_matrices_are_bfloat16_and_others_as_stored(tmp_path):
    assert parsed(tmp_path, sizes()).dtype == "float32"
    assert parsed(tmp_path, sizes(), output=np.zeros((99, 32), "f2")).dtype == "bfloat16"
    packed = Packed(8, (99, 32), bytes(99 * 34))
    source = open_source(write_gguf(tmp_path / "y.gguf", sizes(), {"token_embd.weight": packed}))
    assert source.parse(source.raw_config({})).dtype == "bfloat16"


REFUSED = {
    "another architecture": (sizes("mamba"), "general.architecture is 'mamba'; this build reads gemma, "),
    "none": ({}, "general.architecture is ''"),
    "an architecture of numbers": ({"general.architecture": 3}, "it must be a text"),
    "experts of Qwen 3": (sizes("qwen3") | {"qwen3.expert_count": 4}, "with expert_count"),
    "no size": ({"general.architecture": "llama"}, "lacks "),
    "a size of text": (sizes() | {"llama.block_count": "2"}, "num_hidden_layers is '2'"),
    "a huge size": (sizes() | {"llama.embedding_length": 1 << 31}, "hidden_size is 2147483648"),
    "no head": (sizes() | {"llama.attention.head_count": 0}, "num_attention_heads is 0"),
    "layers that differ": (sizes() | {"llama.feed_forward_length": [32, 48]}, "feed_forward_length differs"),
    "an unknown key": (sizes() | {"llama.new_idea": 1}, "llama.new_idea is 1; hf_overrides="),
    "a key of others": (sizes() | {"llama.attn_logit_softcapping": 3.0}, "attn_logit_softcapping is 3.0"),
    "values of another size": (sizes() | {"llama.attention.value_length": 4}, "value_length is 4"),
    "a rotated part": (sizes() | {"llama.rope.dimension_count": 4}, "dimension_count is 4"),
    "an unknown scaling": (sizes() | {"llama.rope.scaling.type": "new"}, "scaling.type is 'new'"),
    "a window": (sizes() | {"llama.attention.sliding_window": 5}, "has no windows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_is_not_served_is_refused_by_name(name, tmp_path):
    metadata, message = REFUSED[name]
    with pytest.raises((InvalidInput, Unsupported)) as caught:
        parsed(tmp_path, metadata)
    assert message in str(caught.value)
    assert str(caught.value).startswith("x.gguf: ")


def test_an_override_leaves_a_key_of_the_file_out_or_replaces_one_of_config_json(tmp_path):
    metadata = sizes() | {"llama.new_idea": 1}
    source = open_source(write_gguf(tmp_path / "x.gguf", metadata, {"token_embd.weight": np.zeros((9, 32), "f4")}))
    raw = source.raw_config({"llama.new_idea": None, "rope_theta": 500.0})
    assert source.parse(raw).rope_theta == 500.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.0.attn_q.weight": None}, "lack 'blk.0.attn_q.weight'"),
        ({"blk.0.attn_q.weight": np.zeros((32, 31), "f4")}, r"'blk.0.attn_q.weight' has shape \(32, 31\)"),
        ({"blk.0.new.weight": np.zeros(3, "f4")}, "have 'blk.0.new.weight', which"),
        ({"token_embd.weight": None}, "'token_embd.weight' is not in the file"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(changes, message, tmp_path):
    names = {name: np.zeros((32, 32), "f4") for name in ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    names |= dict.fromkeys(("attn_k", "attn_v"), np.zeros((16, 32), "f4"))
    names |= dict.fromkeys(("attn_norm", "ffn_norm"), np.zeros(32, "f4"))
    tensors = {f"blk.0.{name}.weight": value for name, value in names.items()}
    tensors |= {"token_embd.weight": np.zeros((99, 32), "f4"), "output_norm.weight": np.zeros(32, "f4")} | changes
    tensors = {name: value for name, value in tensors.items() if value is not None}
    with pytest.raises(InvalidInput, match=message):
        load_model(write_gguf(tmp_path / "x.gguf", sizes(), tensors), with_tokenizer=False)


def test_sampling_of_a_file_is_its_default(tmp_path):
    more = {"general.sampling.temp": 0.5, "general.sampling.top_k": 40, "tokenizer.ggml.eos_token_id": 7}
    file = write_gguf(tmp_path / "x.gguf", sizes() | more, {})
    defaults = load_generation_defaults(file)
    assert defaults.sampling == {"temperature": 0.5, "top_k": 40}
    assert defaults.eos_token_ids == (7,)
    write_gguf(file, sizes() | {"general.sampling.temp": -1.0}, {})
    with pytest.raises(InvalidInput, match=r"x.gguf: general.sampling.temp is -1.0"):
        load_generation_defaults(file)


def test_a_file_is_saved_as_the_checkpoint_that_it_was_made_from(tmp_path, seed, monkeypatch):
    folder, file = written_as_both(tmp_path, "LlamaForCausalLM", seed, monkeypatch)
    model, config, _ = load_model(file, with_tokenizer=False)
    save_model(tmp_path / "saved", model, config)
    raw = [json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "saved")]
    assert raw[0]["architectures"] == raw[1]["architectures"]
    theirs, ours = (parameters(load_model(each, with_tokenizer=False)[0]) for each in (folder, tmp_path / "saved"))
    for path, value in theirs.items():
        np.testing.assert_array_equal(ours[path], value)
    assert parse_config(raw[1]).head_dim == 16


def test_convert_writes_a_folder_with_the_models_tokenizer_and_defaults(tmp_path, seed, monkeypatch):
    more = {"general.sampling.temp": 0.5, "tokenizer.chat_template": "{{ 1 }}"}
    tokenizer = dict(bpe())
    tokenizer["tokenizer.ggml.token_type"] = tokenizer["tokenizer.ggml.token_type"].tolist()
    monkeypatch.setitem(OPTIONS, "LlamaForCausalLM", {"vocab_size": len(tokenizer["tokenizer.ggml.tokens"])})
    _, file = written_as_both(tmp_path, "LlamaForCausalLM", seed, monkeypatch, **more, **tokenizer)
    assert main(["convert", str(file), str(tmp_path / "saved")]) == 0
    models = [load_model(each) for each in (file, tmp_path / "saved")]
    (_, config, ours), (_, found, theirs) = models
    assert config == found
    assert ours is not None
    assert theirs is not None
    assert ours.encode("Hell w<|end|>") == theirs.encode("Hell w<|end|>")
    assert (theirs.chat_template, theirs.special_tokens["eos_token"]) == ("{{ 1 }}", "<|end|>")
    assert load_generation_defaults(tmp_path / "saved").sampling == {"temperature": 0.5}
    values = [parameters(model) for model, _, _ in models]
    for path, value in values[0].items():
        np.testing.assert_array_equal(values[1][path], value)


def test_a_file_is_compared_with_torch(tmp_path, seed, monkeypatch):
    _, file = written_as_both(tmp_path, "LlamaForCausalLM", seed, monkeypatch)
    report = compare_with_torch(file, [[5, 6, 7]], implementations=["xla"], max_tokens=2)
    assert report.passed
    assert report.model.startswith("x.gguf (")


def test_a_folder_of_gguf_files_names_one(tmp_path):
    write_gguf(tmp_path / "x.gguf", {}, {})
    with pytest.raises(InvalidInput, match=r"name one of them, as in x\.gguf"):
        load_model(tmp_path)
