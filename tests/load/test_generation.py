"""What a folder says besides its weights: sampling defaults, chat templates, and where it lies."""

from __future__ import annotations

import json
import sys

import pytest

from jattn.llm.load import load_generation_defaults, load_model, load_tokenizer, save_model
from jattn.llm.load.folder import check_folder
from jattn.llm.text.prompts import chat_prompt
from tests.support.tiny_models import byte_tokenizer, write_tiny_model
from torch_core.base.errors import InvalidInput

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def written(folder, name, value):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(value))
    return folder


def test_sampling_defaults_are_read_under_the_names_of_sampling_params(tmp_path):
    values = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 7, "eos_token_id": 3}
    defaults = load_generation_defaults(written(tmp_path, "generation_config.json", values))
    assert defaults.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 7}
    assert defaults.eos_token_ids == (3,)


def test_min_p_and_the_repetition_penalty_are_sampling_defaults(tmp_path):
    values = {"min_p": 0.1, "repetition_penalty": 1.05}
    assert load_generation_defaults(written(tmp_path, "generation_config.json", values)).sampling == values


def test_keys_that_would_change_a_text_and_are_not_honoured_are_named(tmp_path):
    values = {"num_beams": 4, "no_repeat_ngram_size": 0, "suppress_tokens": [7], "bad_words_ids": [], "max_length": 20}
    defaults = load_generation_defaults(written(tmp_path, "generation_config.json", values))
    assert defaults.unserved == ("num_beams", "suppress_tokens")


@pytest.mark.parametrize(
    ("given", "token", "unserved"),
    [([5], 5, ()), ([], None, ()), ([5, 6], None, ("forced_eos_token_id",))],
    ids=["one", "none", "two"],
)
def test_of_a_list_of_forced_last_tokens_one_is_served_and_more_are_named(given, token, unserved, tmp_path):
    defaults = load_generation_defaults(written(tmp_path, "generation_config.json", {"forced_eos_token_id": given}))
    assert (defaults.forced_eos_token_id, defaults.unserved) == (token, unserved)


def test_a_file_that_says_not_to_sample_means_temperature_zero(tmp_path):
    values = {"do_sample": False, "temperature": 0.6}
    assert load_generation_defaults(written(tmp_path, "generation_config.json", values)).temperature == 0.0


def test_a_folder_without_the_file_has_no_defaults(tmp_path):
    assert load_generation_defaults(tmp_path).sampling == {}


def test_an_impossible_default_is_refused(tmp_path):
    written(tmp_path, "generation_config.json", {"top_p": 1.5})
    with pytest.raises(InvalidInput, match=r"^generation_config\.json: top_p is 1\.5; it must be from 1e-09 to 1\.$"):
        load_generation_defaults(tmp_path)


@pytest.mark.parametrize(
    "described",
    [TEMPLATE, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]],
    ids=["text", "list"],
)
def test_a_chat_template_of_the_tokenizer_config_is_kept(described, tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    written(tmp_path, "tokenizer_config.json", {"chat_template": described})
    assert load_tokenizer(tmp_path).chat_template == TEMPLATE


def test_a_chat_template_of_its_own_file_wins_and_is_saved_again(tmp_path, seed):
    folder = write_tiny_model(tmp_path / "first", seed, num_hidden_layers=1)
    written(folder, "tokenizer_config.json", {"chat_template": "older"})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    model, config, tokenizer = load_model(folder)
    save_model(tmp_path / "second", model, config, tokenizer)
    assert load_tokenizer(tmp_path / "second").chat_template == TEMPLATE


def test_a_template_of_conversations_with_tools_is_kept_and_saved_again(tmp_path, seed):
    folder = write_tiny_model(tmp_path / "first", seed, num_hidden_layers=1)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools[0].name }}"}]
    written(folder, "tokenizer_config.json", {"chat_template": named})
    model, config, tokenizer = load_model(folder)
    save_model(tmp_path / "second", model, config, tokenizer)
    for each in (tokenizer, load_tokenizer(tmp_path / "second")):
        plain, with_tools = chat_prompt(each, []), chat_prompt(each, [], tools=[{"name": "a"}])
        assert isinstance(plain, dict)
        assert isinstance(with_tools, dict)
        assert (plain["prompt"], with_tools["prompt"]) == ("plain", "with a")


def test_a_tokenizer_config_of_many_tokens_is_read(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    many = {str(token): {"content": f"<unused{token}>" * 10} for token in range(10_000)}
    written(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": many, "bos_token": "<s>"})
    assert load_tokenizer(tmp_path).special_tokens == {"bos_token": "<s>"}


def test_a_chat_template_that_is_no_text_is_refused(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for template in (7, [{"name": "default", "template": 7}]):
        written(tmp_path, "tokenizer_config.json", {"chat_template": template})
        with pytest.raises(InvalidInput, match=r"^tokenizer_config\.json: chat_template is 7; it must be a text, or"):
            load_tokenizer(tmp_path)
    written(tmp_path, "tokenizer_config.json", {"chat_template": [{"name": [1], "template": "x"}, 7]})
    assert load_tokenizer(tmp_path).chat_template is None


def test_a_name_of_the_hub_is_found_in_its_cache(tmp_path, seed, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    folder = write_tiny_model(tmp_path, seed, num_hidden_layers=1)
    asked = []

    def download(name, *, local_files_only):
        asked.append((name, local_files_only))
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert check_folder("org/model") == folder.resolve()
    assert asked == [("org/model", True)]


def test_a_name_that_is_not_in_the_cache_says_how_to_fetch_it(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def download(name, *, local_files_only):
        raise FileNotFoundError(name)

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(InvalidInput, match=r"has no such model; fetch it with `hf download org/model`\.$"):
        check_folder("org/model")


def test_without_huggingface_hub_its_cache_is_not_searched(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InvalidInput, match=r"and without huggingface_hub its cache is not searched\.$"):
        check_folder("org/model")


def test_a_shorter_context_is_that_of_the_config(tmp_path, seed):
    folder = write_tiny_model(tmp_path, seed, num_hidden_layers=1)
    assert load_model(folder, max_model_len=64)[1].max_position_embeddings == 64
    with pytest.raises(InvalidInput, match=r"^max_model_len is 257; it must be from 1 to 256\.$"):
        load_model(folder, max_model_len=257)


def test_progress_is_shown_on_stderr_when_asked_for(tmp_path, seed, capsys):
    folder = write_tiny_model(tmp_path, seed, num_hidden_layers=1)
    load_model(folder)
    assert capsys.readouterr().err == ""
    load_model(folder, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Loading ")
