"""Folders of sentence-transformers: EmbeddingGemma's vectors are those of its modules, texts begin with prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from jattn.llm.engine import LLM
from jattn.llm.load import SentenceModules, TextTokenizer, load_sentence_modules
from jattn.llm.load.sentence import SentenceDense
from jattn.llm.text.embeddings import embed
from jattn.llm.text.pairs import as_pieces
from jattn.llm.text.prompts import with_beginning
from tests.support.saved import assert_saved_as_it_was
from tests.support.tiny_models import byte_tokenizer, reference_bound, tiny_config, tiny_model
from torch_core.base.errors import InvalidInput, Unsupported

PROMPTS = {"query": "q: ", "document": "d: "}
TYPE = "sentence_transformers.models"
IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"
MODULES = [("", f"{TYPE}.Transformer"), ("1_Pooling", f"{TYPE}.Pooling"), ("2_Dense", f"{TYPE}.Dense")]
MODULES += [("3_Dense", f"{TYPE}.Dense"), ("4_Normalize", f"{TYPE}.Normalize")]


def write_modules(folder: Path, modules: list[tuple[str, str]], pooling: dict[str, Any]) -> None:
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": kind} for index, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))


def write_dense(folder: Path, sizes: tuple[int, int], activation: str, random: Any, *, bias: bool) -> None:
    folder.mkdir()
    config = {"in_features": sizes[0], "out_features": sizes[1], "bias": bias, "activation_function": activation}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"linear.weight": random.normal(0, 0.3, sizes[::-1])} | (
        {"linear.bias": random.normal(0, 0.3, sizes[1])} if bias else {}
    )
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors))


@pytest.fixture
def gemma(tmp_path, seed) -> Path:
    """A folder as EmbeddingGemma's, with 32 elements of a vector after 48 between two dense layers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.Gemma3TextConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        use_bidirectional_attention=True,
        initializer_range=0.3,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.Gemma3TextModel(config).save_pretrained(tmp_path)
    random = np.random.default_rng(seed)
    write_modules(tmp_path, MODULES, {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True})
    write_dense(tmp_path / "2_Dense", (32, 48), IDENTITY, random, bias=False)
    write_dense(tmp_path / "3_Dense", (48, 32), TANH, random, bias=True)
    written = {"prompts": PROMPTS, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(written))
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def expected(folder: Path, token_ids: tuple[int, ...], dtype: str) -> np.ndarray:
    """What sentence-transformers computes of one text, before it makes it 1 long."""
    import torch
    import transformers

    model = transformers.Gemma3TextModel.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    with torch.no_grad():
        states = model(torch.tensor([token_ids])).last_hidden_state[0]
    vector = states.mean(0)
    for name, activation in (("2_Dense", lambda x: x), ("3_Dense", torch.tanh)):
        stored = safetensors.numpy.load((folder / name / "model.safetensors").read_bytes())
        weights = {key: torch.from_numpy(value).to(vector.dtype) for key, value in stored.items()}
        vector = activation(weights["linear.weight"] @ vector + weights.get("linear.bias", 0))
    return vector.double().numpy()


def test_vectors_of_embedding_gemma_pass_its_dense_layers_and_texts_begin_with_their_prompt(gemma) -> None:
    with LLM(gemma) as llm:
        plain = llm.embed(["A list of words", "A tuple"], normalize=False)
        (queried,) = llm.embed("A tuple", prompt_name="query")
        (whole,) = llm.embed({"prompt": "q: A tuple"})
        (tokens,) = llm.embed([[65, 66]], prompt_name="query")
        score = llm.score("A tuple", "A list of words")[0].outputs.score
    for each in plain:
        exact, same_dtype = (expected(gemma, each.prompt_token_ids, dtype) for dtype in ("float64", "float32"))
        assert np.abs(each.outputs.embedding - exact).max() <= reference_bound(exact, same_dtype)
    assert queried.prompt_token_ids == whole.prompt_token_ids
    np.testing.assert_array_equal(queried.outputs.embedding, whole.outputs.embedding)
    np.testing.assert_allclose(np.linalg.norm(whole.outputs.embedding), 1, rtol=2.0**-20)
    assert tokens.prompt_token_ids == (65, 66)
    first, second = (each.outputs.embedding / np.linalg.norm(each.outputs.embedding) for each in plain)
    np.testing.assert_allclose(score, first @ second, atol=2.0**-20)


def test_embedding_gemma_is_saved_as_it_was_and_needs_both_sides(gemma, tmp_path) -> None:
    assert_saved_as_it_was(gemma, tmp_path / "again")
    with pytest.raises(Unsupported, match=r"use_bidirectional_attention is False; this build reads Gemma3TextModel wh"):
        LLM(gemma, hf_overrides={"use_bidirectional_attention": False})


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_a_folder_may_read_texts_in_lower_case(gemma, name) -> None:
    (gemma / name).write_text(json.dumps({"max_seq_length": 128, "do_lower_case": True}))
    with LLM(gemma) as llm:
        upper, lower = llm.embed(["A TUPLE", "a tuple"], prompt_name="query")
        scores = [each.outputs.score for each in llm.score("A List", ["A TUPLE", "a tuple"])]
        (tokens,) = llm.embed([[65, 66]])
    assert upper.prompt_token_ids == lower.prompt_token_ids
    assert scores[0] == scores[1]
    assert tokens.prompt_token_ids == (65, 66)


def test_dense_layers_that_are_no_numbers_are_refused(gemma) -> None:
    file = gemma / "2_Dense" / "model.safetensors"
    tensors = safetensors.numpy.load(file.read_bytes())
    tensors["linear.weight"][1, 2] = np.nan
    file.write_bytes(safetensors.numpy.save(tensors))
    with pytest.raises(
        InvalidInput, match=r"^2_Dense/model\.safetensors has NaN or infinite numbers in linear\.weight"
    ):
        load_sentence_modules(gemma)


def test_an_unknown_prompt_is_refused_by_the_names_that_there_are(gemma) -> None:
    modules = load_sentence_modules(gemma)
    assert modules.prompt(None) == modules.prompt("") == ""
    with pytest.raises(InvalidInput, match=r"^prompt_name is 'title'; the model's folder has 'query', 'document'\.$"):
        modules.prompt("title")


@pytest.mark.parametrize(
    ("pooling", "found"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
    ],
)
def test_the_pooling_of_a_folder_is_read_in_both_spellings(tmp_path, pooling, found) -> None:
    write_modules(tmp_path, MODULES[:2], pooling)
    assert load_sentence_modules(tmp_path).pooling == found


@pytest.mark.parametrize(
    ("modules", "pooling", "unserved"),
    [
        (MODULES[:2], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "Pooling of 1_Pooling"),
        (MODULES[:2], {"pooling_mode": "weightedmean"}, "Pooling of 1_Pooling"),
        ([*MODULES[:2], ("2_LayerNorm", f"{TYPE}.LayerNorm")], {"pooling_mode": "mean"}, "LayerNorm of 2_LayerNorm"),
        (MODULES[:2], {"pooling_mode": "mean", "include_prompt": False}, "Pooling of 1_Pooling"),
        ([("", "own.Transformer"), MODULES[1]], {"pooling_mode": "mean"}, "own.Transformer of "),
        ([*MODULES[:2], MODULES[1]], {"pooling_mode": "mean"}, "Pooling of 1_Pooling"),
        ([MODULES[0], MODULES[4], MODULES[1]], {"pooling_mode": "mean"}, "Normalize of 4_Normalize"),
    ],
)
def test_modules_that_are_missing_here_are_named(tmp_path, modules, pooling, unserved) -> None:
    write_modules(tmp_path, modules, pooling)
    name, _, where = unserved.partition(" of ")
    assert load_sentence_modules(tmp_path).unserved == (f"{name!r} of {where!r}",)


@pytest.mark.parametrize("named", [{"module_input_name": "token_embeddings"}, {"module_output_name": []}])
def test_a_dense_layer_of_tokens_is_not_taken_for_one_of_texts(tmp_path, seed, named) -> None:
    write_modules(tmp_path, MODULES[:3], {"pooling_mode": "mean"})
    write_dense(tmp_path / "2_Dense", (2, 3), IDENTITY, np.random.default_rng(seed), bias=False)
    file = tmp_path / "2_Dense" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    assert load_sentence_modules(tmp_path).unserved == ("'Dense' of '2_Dense'",)


def test_a_dense_layer_that_does_not_follow_the_vectors_before_it_is_refused(seed) -> None:
    model = tiny_model(tiny_config(num_hidden_layers=1), seed)
    layer = SentenceDense(np.zeros((model.config.hidden_size, 5), np.float32), None, "tanh")
    with pytest.raises(InvalidInput, match=r"^modules\.dense\[1\] has \d+ inputs; the vectors have 5 elements\.$"):
        embed(model, [[1]], pooling=None, normalize=True, modules=SentenceModules(dense=(layer, layer)))


@pytest.mark.parametrize("name", [[], 0, b"query", False])
def test_the_name_of_a_prompt_is_a_string(name) -> None:
    with pytest.raises(InvalidInput, match=r"^prompt_name is .*; it must be a string, or None\.$"):
        SentenceModules(prompts=PROMPTS).prompt(name)


@pytest.mark.parametrize("prompt", [None, 3, {1: 2}])
def test_token_ids_that_are_no_list_are_refused(prompt, seed) -> None:
    model = tiny_model(tiny_config(num_hidden_layers=1), seed)
    with pytest.raises(InvalidInput, match=r"^prompts\[0\] is .*; it must be a list of token ids\.$"):
        embed(model, [prompt], pooling=None, normalize=True)


@pytest.mark.parametrize("cut", ["x", [], 1.5])
def test_the_tokens_of_a_cut_prompt_are_a_number(cut) -> None:
    with pytest.raises(InvalidInput, match=r"^truncate_prompt_tokens is .*; it must be an int"):
        as_pieces(TextTokenizer(byte_tokenizer()), [("a",)], 8, cut=cut)


def test_a_prompt_that_is_no_text_is_refused_after_a_beginning_too() -> None:
    with pytest.raises(InvalidInput, match="a prompt is a mapping with the keys"):
        with_beginning("q: ", {"prompt": 3})


def test_vectors_of_modules_that_are_missing_here_are_refused(seed) -> None:
    model, modules = tiny_model(tiny_config(num_hidden_layers=1), seed), SentenceModules(unserved=("Pooling of 1",))
    with pytest.raises(Unsupported, match=r"^modules\.json of the model's folder has Pooling of 1; without them its v"):
        embed(model, [[1]], pooling=None, normalize=True, modules=modules)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("modules.json", "{}", r"^modules\.json holds a JSON dict; it must be an array"),
        ("modules.json", '[{"type": 3}]', r"^modules\.json has the entry .*; each has a type and a path"),
        (
            "modules.json",
            '[{"type": "a.Pooling", "path": "../x"}]'.replace("a.", f"{TYPE}."),
            r"^file name '\.\./x' is not a plain name",
        ),
        (
            "2_Dense/config.json",
            '{"in_features": 3, "out_features": 4, "activation_function": "torch.nn.modules.linear.Identity"}',
            r"^2_Dense/model\.safetensors has the tensors",
        ),
        ("config_sentence_transformers.json", '{"prompts": {"a": 3}}', r"prompts is \{'a': 3\}; it must be texts"),
        ("modules.json", json.dumps([{"type": "a", "path": ""}] * 65), r"^modules\.json has 65 entries; at most 64"),
        (
            "2_Dense/config.json",
            '{"in_features": 0}',
            r"^2_Dense/config\.json: out_features is None; it must be an int",
        ),
        ("2_Dense/config.json", '{"bias": "no"}', r"^2_Dense/config\.json: bias is 'no'; it must be True or False"),
        (
            "sentence_bert_config.json",
            '{"do_lower_case": 1}',
            r"^sentence_bert_config\.json: do_lower_case is 1; it must be True or False",
        ),
        ("config_sentence_transformers.json", '{"prompts": []}', r"prompts is \[\]; it must be texts"),
        (
            "config_sentence_transformers.json",
            '{"default_prompt_name": []}',
            r"default_prompt_name is \[\]; prompts has",
        ),
        (
            "config_sentence_transformers.json",
            '{"default_prompt_name": "b"}',
            r"default_prompt_name is 'b'; prompts has",
        ),
    ],
)
def test_broken_files_of_modules_are_refused(gemma, name, text, message) -> None:
    (gemma / name).write_text(text)
    with pytest.raises(InvalidInput, match=message):
        load_sentence_modules(gemma)
