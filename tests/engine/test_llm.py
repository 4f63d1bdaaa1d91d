"""Text in, text out, with a tiny model on disk."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from jattn.llm.engine import LLM, EngineConfig, SamplingParams, generate
from jattn.llm.load import load_tokenizer
from jattn.llm.text.prompts import chat_prompt
from tests.support.tiny_models import write_tiny_model
from torch_core.base.errors import InvalidInput, RequestTooLong

CONFIG = EngineConfig(block_size=8, max_num_seqs=2, max_num_batched_tokens=32)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, config=CONFIG)


def test_fields_of_the_engines_config_are_keywords_too(folder: Path, llm: Any) -> None:
    found: Any = LLM(folder, block_size=8, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=24)

    assert found.max_model_len == 24
    assert found.engine._core._config == replace(llm.engine._core._config, max_model_len=24)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"gpu_memory_utilization": 0.9},
            TypeError,
            "LLM() got an unexpected keyword argument 'gpu_memory_utilization'; besides its own it takes Engine",
        ),
        (
            {"max_model_len": 24, "config": CONFIG},
            InvalidInput,
            "max_model_len: given beside config; name all in one of them.",
        ),
        ({"max_model_len": 0}, InvalidInput, "max_model_len is 0; it must be "),
    ],
)
def test_other_keywords_than_fields_of_the_config_are_refused(
    folder: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as found:
        LLM(folder, **options)
    assert str(found.value).startswith(message)


def test_results_come_in_the_order_of_the_prompts(llm) -> None:
    prompts = ["a longer prompt", "b", "third"]
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (6, 2, 4)]

    outputs = llm.generate(prompts, params)

    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 2, 4]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3


def test_a_string_and_its_token_ids_give_the_same_tokens(llm) -> None:
    ids = llm.tokenizer.encode("same")

    by_text, by_ids = llm.generate("same", GREEDY), llm.generate(ids, GREEDY)

    assert by_text[0].outputs == by_ids[0].outputs
    assert by_ids[0].prompt is None


def test_the_streamed_text_joins_to_the_result(llm) -> None:
    deltas = list(llm.stream(["x", "yz"], GREEDY))

    for index in range(2):
        text = "".join(delta.text for delta in deltas if delta.index == index)
        (output,) = [delta.output for delta in deltas if delta.index == index and delta.output is not None]
        assert text == output.outputs[0].text


def test_a_stop_string_ends_the_text_before_it(llm) -> None:
    text = llm.generate("stop here", GREEDY)[0].outputs[0].text
    stop = text[2]
    params = SamplingParams(temperature=0.0, max_tokens=6, stop=(stop,), ignore_eos=True)

    completion = llm.generate("stop here", params)[0].outputs[0]

    assert completion.text == text[: text.index(stop)]
    assert completion.finish_reason == "stop"


def test_a_stop_string_that_the_last_allowed_token_completes_is_the_reason(llm) -> None:
    text = llm.generate("stop here", GREEDY)[0].outputs[0].text
    stop = text[2]
    params = SamplingParams(temperature=0.0, max_tokens=text.index(stop) + 1, stop=(stop,), ignore_eos=True)

    completion = llm.generate("stop here", params)[0].outputs[0]

    assert (completion.text, completion.finish_reason) == (text[: text.index(stop)], "stop")


def test_a_prompt_may_come_as_vllms_mapping(llm) -> None:
    ids = llm.tokenizer.encode("same")

    outputs = llm.generate([{"prompt": "same"}, {"prompt_token_ids": ids}], GREEDY)

    assert outputs[0].outputs == outputs[1].outputs == llm.generate({"prompt": "same"}, GREEDY)[0].outputs
    assert [output.prompt for output in outputs] == ["same", None]


def test_closing_a_stream_early_cancels_its_requests(llm) -> None:
    stream = llm.stream(["x", "y"], GREEDY)
    next(stream)
    stream.close()

    assert llm.engine.num_unfinished == 0
    assert llm.engine.cache_stats().used == 0


def test_one_bad_prompt_starts_none(llm) -> None:
    with pytest.raises(InvalidInput, match="is empty; it needs at least one token"):
        llm.generate(["fine", []], GREEDY)

    assert llm.engine.num_unfinished == 0


def test_an_empty_string_is_no_prompt(llm) -> None:
    with pytest.raises(InvalidInput, match="a prompt is an empty string; give it at least one character, or pass"):
        llm.generate(["fine", ""], GREEDY)

    assert llm.engine.num_unfinished == 0


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(llm) -> None:
    with pytest.raises(
        RequestTooLong, match=r"needs 306 tokens \(300 prompt \+ 6 new\); this engine's max_model_len is 256"
    ):
        llm.generate([[1] * 300], GREEDY)


def test_more_tokens_than_the_model_has_places_are_refused_as_what_they_are(llm) -> None:
    with pytest.raises(RequestTooLong) as error:
        llm.generate([[1] * 3, [1]], SamplingParams(max_tokens=256))

    assert str(error.value) == (
        "max_tokens is 256; this engine's max_model_len is 256, and the prompt has 3 of it. Lower it, or pass None for "
        "as many as there is room for."
    )


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([], GREEDY, "prompts is empty; pass at least one."),
        (["a", "b"], [GREEDY], "sampling_params has 1 entries and there are 2 prompts; pass one or 2."),
        (["a"], {"temperature": 0}, "sampling_params is a dict; pass SamplingParams or a list of them."),
        (["a"], [{"temperature": 0}], "params is a dict; it must be SamplingParams, or None."),
        (b"a", GREEDY, "prompts is a bytes; pass a prompt or a list of them."),
        (5, GREEDY, "prompts is a int; pass a prompt or a list of them."),
        (
            {"prompt_token_ids": "ab"},
            GREEDY,
            (
                "a prompt is a mapping with the keys ['prompt_token_ids']; it must be {'prompt': text} or "
                "{'prompt_token_ids': ids}."
            ),
        ),
        (["a", 5], GREEDY, "prompts[1] is a int among prompts; see LLM.generate."),
        (
            {"text": "a"},
            GREEDY,
            "a prompt is a mapping with the keys ['text']; it must be {'prompt': text} or {'prompt_token_ids': ids}.",
        ),
        (
            ["fine", "a\ud800"],
            GREEDY,
            "prompts[1]: character 1 of a prompt is a lone surrogate, U+D800; text must be what UTF-8 can encode.",
        ),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_and_nothing_starts(llm, prompts, params, message) -> None:
    with pytest.raises(InvalidInput) as error:
        llm.generate(prompts, params)

    assert str(error.value) == message
    assert llm.engine.num_unfinished == 0


def test_generate_takes_an_llm_a_decoder_or_a_folder(llm, folder) -> None:
    expected = generate(llm, "abc", max_tokens=3)[0].outputs[0].token_ids

    assert generate(str(folder), "abc", max_tokens=3)[0].outputs[0].token_ids == expected
    assert generate(llm.model, [llm.tokenizer.encode("abc")], max_tokens=3)[0].outputs[0].token_ids == expected


WRONG_TOKENIZER = (
    "tokenizer is 5; it must be a jattn.llm.load.TextTokenizer, a tokenizer of tokenizers or of transformers, a "
    "sentencepiece.SentencePieceProcessor, or None."
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 5}, "folder is a int; it must be a path."),
        ({"model": b"folder"}, "folder is a bytes; it must be a path."),
        ({"tokenizer": 5}, WRONG_TOKENIZER),
        ({"config": {"max_num_seqs": 4}}, "config is a dict; it must be an EngineConfig, or None."),
        ({"model": None, "config": {"max_num_seqs": 4}}, "config is a dict; it must be an EngineConfig, or None."),
    ],
)
def test_an_llm_of_the_wrong_things_is_not_built(llm, arguments, message) -> None:
    with pytest.raises(InvalidInput) as error:
        LLM(**{"model": llm.model, **arguments})

    assert str(error.value) == message


def test_a_decoder_brings_its_own_dtype(llm) -> None:
    with pytest.raises(InvalidInput, match=r"^dtype, implementation, quantization and hf_overrides belong"):
        LLM(llm.model, dtype="float32")


def test_text_needs_a_tokenizer(llm) -> None:
    bare = LLM(llm.model, config=CONFIG)

    with pytest.raises(InvalidInput, match=r"the model has no tokenizer; .* LLM\(model, tokenizer=...\)"):
        bare.generate("text", GREEDY)
    with pytest.raises(InvalidInput, match=r"^stop is given, but there is no tokenizer that makes the text"):
        bare.generate([1, 2], replace(GREEDY, stop="a"))


def test_a_tokenizer_that_is_given_takes_the_place_of_the_folders(folder, tmp_path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(InvalidInput, match=r"^the folder has no tokenizer\.json"):
        LLM(bare, config=CONFIG)

    given = load_tokenizer(folder)
    assert LLM(bare, tokenizer=given, config=CONFIG).tokenizer is given


def test_a_folder_without_a_tokenizer_generates_from_token_ids(llm, folder, tmp_path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()

    (output,) = LLM(bare, skip_tokenizer_init=True, config=CONFIG).generate([[5, 6, 7]], GREEDY)
    (expected,) = llm.generate([[5, 6, 7]], GREEDY)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_an_int_or_a_key_is_the_source_of_all_seeds(llm) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    tokens = lambda **options: [  # noqa: E731
        output.outputs[0].token_ids for output in llm.generate(["x", "x"], params, **options)
    ]

    assert tokens(rng=5) == tokens(rng=5) == tokens(rng=5)
    assert tokens(rng=jax.random.key(5)) == tokens(rng=jax.random.key(5)) != tokens(rng=jax.random.key(6))
    assert len({*tokens(rng=5), *tokens(rng=jax.random.key(5))}) == 4


@pytest.mark.parametrize(
    ("rng", "message"),
    [
        (-1, "rng is -1; it must be from 0 to 4294967295, or a jax key."),
        ("x", "rng is 'x'; it must be an int from 0 to 4294967295, or a jax key."),
        (jnp.zeros(3), "rng is an array of float32[3]; pass an int or one jax key."),
    ],
)
def test_what_is_no_source_of_randomness_is_refused(llm, rng, message) -> None:
    with pytest.raises(InvalidInput) as error:
        llm.generate("x", GREEDY, rng=rng)

    assert str(error.value) == message


def test_a_chat_is_the_templates_prompt(llm) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    conversation = [{"role": "u", "content": "hi"}]

    one = llm.chat(conversation, GREEDY, chat_template=template)
    two = llm.chat([conversation, conversation], GREEDY, chat_template=template, add_generation_prompt=False)

    assert [output.prompt for output in one + two] == ["<u>hi<a>", "<u>hi", "<u>hi"]
    assert one[0].outputs == llm.generate("<u>hi<a>", GREEDY)[0].outputs


def test_a_chat_hands_variables_of_any_name_to_the_template(llm) -> None:
    template = "{{ tokenizer }}{{ enable_thinking }}{{ messages[0].content }}"
    variables = {"enable_thinking": False, "tokenizer": 5, "self": 1}

    (output,) = llm.chat(
        [{"role": "u", "content": "hi"}], GREEDY, chat_template=template, chat_template_kwargs=variables
    )

    assert output.prompt == "5Falsehi"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (5, "chat_template_kwargs is 5; it must map names of variables to values."),
        ({1: 2}, "chat_template_kwargs is {1: 2}; it must map names of variables to values."),
        ({"tools": []}, "chat_template_kwargs has 'tools', which is given beside it and not in it."),
    ],
)
def test_variables_that_a_template_cannot_have_are_refused(llm, variables, message) -> None:
    with pytest.raises(InvalidInput) as error:
        llm.chat([{"role": "u", "content": "hi"}], GREEDY, chat_template="x", chat_template_kwargs=variables)

    assert str(error.value) == message


@pytest.mark.parametrize("messages", [None, 5, "hi", [None], [[{"role": "u", "content": "hi"}], "a"]])
def test_what_is_no_conversation_is_refused(llm, messages) -> None:
    with pytest.raises(
        InvalidInput, match=r"^messages is .*; it must be a list of mappings with role and content, or "
    ):
        llm.chat(messages, GREEDY, chat_template="x")


def test_a_template_of_another_kind_is_refused(llm) -> None:
    with pytest.raises(InvalidInput, match=r"^chat_template is \[\]; it must be text, or a ChatTemplate\.$"):
        llm.chat([{"role": "u", "content": "hi"}], GREEDY, chat_template=[])


def test_parameters_of_another_kind_are_refused_beside_a_seed_too(llm) -> None:
    with pytest.raises(InvalidInput, match=r"^params is a dict; it must be SamplingParams, or None\.$"):
        llm.generate("x", [{"temperature": 0}], rng=1)


def test_a_chat_needs_a_template(llm) -> None:
    with pytest.raises(
        InvalidInput,
        match=r"^the model has no chat template; pass chat_template \(to a command, --chat-template FILE\)\.$",
    ):
        llm.chat([{"role": "u", "content": "hi"}])


def test_a_model_folder_brings_its_template(folder, tmp_path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")

    prompt: Any = chat_prompt(load_tokenizer(tmp_path), [{"content": "hi"}])

    assert prompt["prompt"] == "<|endoftext|>hi<|endoftext|>"
    assert prompt["prompt_token_ids"][0] == prompt["prompt_token_ids"][-1] == 0


def test_progress_goes_to_stderr(llm, capsys) -> None:
    llm.generate(["x", "y"], GREEDY, use_tqdm=True)

    assert "2/2" in capsys.readouterr().err


def test_a_folders_own_defaults_hold_for_requests_without_parameters(tmp_path, seed) -> None:
    folder = write_tiny_model(tmp_path, seed, num_hidden_layers=1)
    (folder / "generation_config.json").write_text('{"do_sample": false, "max_new_tokens": 3}')
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=64, fixed_shapes=True)
    with LLM(folder, config=config) as llm, LLM(folder, config=config, use_generation_config=False) as plain:
        (output,) = llm.generate("a")

        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
        assert len(output.outputs[0].token_ids) == 3 or output.outputs[0].finish_reason == "stop"
        assert plain.get_default_sampling_params() == SamplingParams()


def test_a_text_that_was_cut_ends_with_the_token_that_the_folder_forces(tmp_path, seed) -> None:
    folder = write_tiny_model(tmp_path, seed, num_hidden_layers=1, eos_token_ids=())
    (folder / "generation_config.json").write_text('{"forced_eos_token_id": 5}')
    asked = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1)
    with LLM(folder, config=EngineConfig(max_num_seqs=1, max_num_batched_tokens=64, fixed_shapes=True)) as llm:
        own, forced = (
            llm.generate([[7, 8, 9]], each)[0].outputs[0] for each in (replace(asked, ignore_eos=True), asked)
        )
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).generate(
        torch.tensor([[7, 8, 9]]), max_new_tokens=4, do_sample=False
    )

    assert forced.token_ids == (*own.token_ids[:-1], 5)
    assert theirs[0, -1] == 5
    assert forced.logprobs[:-1] == own.logprobs[:-1]
    assert (forced.logprobs[-1][5].logprob, forced.logprobs[-1][5].rank) == (0.0, 1)


def test_a_folder_that_asks_for_what_is_not_served_is_loaded_with_a_warning(tmp_path, seed) -> None:
    folder = write_tiny_model(tmp_path, seed, num_hidden_layers=1)
    (folder / "generation_config.json").write_text('{"num_beams": 4}')
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=64)
    named = r"^generation_config\.json has num_beams, whose effect is missing here\.$"
    with pytest.warns(UserWarning, match=named), LLM(folder, config=config):
        pass


def test_the_documentation_of_an_llm_names_every_option_of_its_engine() -> None:
    assert LLM.__doc__ is not None
    options = LLM.__doc__.partition("engine_options:")[2]

    assert [name for name in EngineConfig.__dataclass_fields__ if name not in options] == []
