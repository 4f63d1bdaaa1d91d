"""Adapters over HTTP: loaded and unloaded while the server runs, and named as a request's model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from jattn.llm.engine import SamplingParams
from jattn.llm.engine.clients import adapters
from jattn.llm.models import Decoder, ModelConfig
from jattn.llm.serve.server import _loras, main
from tests.serve.conftest import KEY, MODEL, Running
from tests.support.lora_models import peft_folder, peft_tensors


def config_of(server: Running) -> ModelConfig:
    model = server.llm.llm.model
    assert isinstance(model, Decoder)
    return model.config


@pytest.fixture
def folder(server: Running, tmp_path: Path) -> Iterator[str]:
    """A folder whose adapter answers unlike the base."""
    tensors = peft_tensors(config_of(server), 1)
    yield str(peft_folder(tmp_path / "lora", tensors, lora_alpha=40))
    for name in server.llm.llm.engine.list_loras():
        server.llm.llm.engine.remove_lora(name)


def post(server: Running, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=600)


def test_an_adapter_is_a_model_from_its_loading_to_its_unloading(server, client, folder):
    found = post(server, "load_lora_adapter", lora_name="tuned", lora_path=folder)
    assert (found.status_code, found.text) == (200, "Success: LoRA adapter 'tuned' added successfully.")
    cards = {card.id: card for card in client.models.list()}
    assert cards.keys() == {MODEL, "tuned"}
    assert cards["tuned"].model_extra["parent"] == MODEL
    options = {"prompt": "The list", "max_tokens": 4, "temperature": 0}
    base, tuned = (client.completions.create(model=name, **options) for name in (MODEL, "tuned"))
    assert (base.model, tuned.model) == (MODEL, "tuned")
    assert base.choices[0].text != tuned.choices[0].text
    asyncio.run(server.llm.pin_lora("tuned"))
    assert list(asyncio.run(server.llm.list_loras())) == ["tuned"]
    direct = server.llm.llm.generate("The list", SamplingParams(temperature=0.0, max_tokens=4), lora_request="tuned")[0]
    assert tuned.choices[0].text == direct.outputs[0].text
    assert post(server, "unload_lora_adapter", lora_name="tuned").status_code == 200
    with pytest.raises(openai.NotFoundError, match="model 'tuned' is not served; 'embedded' is"):
        client.completions.create(model="tuned", **options)


@pytest.mark.parametrize(
    ("path", "method", "body"),
    [
        pytest.param("completions", "add", {"model": "tuned", "prompt": "x"}, id="asked"),
        pytest.param("unload_lora_adapter", "remove_lora", {"lora_name": "tuned"}, id="unloaded"),
    ],
)
def test_an_adapter_that_is_unloaded_after_it_was_found_is_not_served(server, folder, monkeypatch, path, method, body):
    post(server, "load_lora_adapter", lora_name="tuned", lora_path=folder)
    engine = server.llm.llm.engine
    call, remove = getattr(engine, method), engine.remove_lora

    def remove_and_call(*args, **options):
        remove("tuned")
        return call(*args, **options)

    monkeypatch.setattr(engine, method, remove_and_call)
    refused = post(server, path, **body)

    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_the_server_answers_while_an_adapter_is_loaded_and_another_is_to_be_unloaded(server, folder, monkeypatch):
    begun, waits, answered = threading.Event(), threading.Event(), threading.Event()
    load, remove = adapters.load_adapter, adapters.AdapterRegistry.remove
    post(server, "load_lora_adapter", lora_name="old", lora_path=folder)

    def load_late(*args):
        begun.set()
        assert answered.wait(60)
        return load(*args)

    def note_and_remove(*args):
        waits.set()
        remove(*args)

    monkeypatch.setattr(adapters, "load_adapter", load_late)
    monkeypatch.setattr(adapters.AdapterRegistry, "remove", note_and_remove)
    with ThreadPoolExecutor(2) as threads:
        loading = threads.submit(post, server, "load_lora_adapter", lora_name="new", lora_path=folder)
        assert begun.wait(60)
        unloading = threads.submit(post, server, "unload_lora_adapter", lora_name="old")
        assert waits.wait(60)
        try:
            assert httpx.get(f"{server.url}/health").status_code == 200
        finally:
            answered.set()

    assert [each.result().status_code for each in (loading, unloading)] == [200, 200]


def test_a_module_in_json_is_over_the_base_that_it_names(server, client, folder):
    texts = [json.dumps({"name": "a", "path": folder, "base_model_name": "org/base"}), f"b={folder}"]
    for request in _loras(texts, (MODEL,)):
        server.llm.llm.engine.add_lora(request)
    parents = {card.id: card.model_extra.get("parent") for card in client.models.list()}
    assert parents == {MODEL: None, "a": "org/base", "b": MODEL}


def test_folders_and_names_that_do_not_fit_are_refused_by_name(server, folder, tmp_path):
    load = lambda **body: post(server, "load_lora_adapter", **body)  # noqa: E731
    assert load(lora_name="x").json()["error"]["param"] == "lora_path"
    assert load(lora_path=folder).json()["error"]["param"] == "lora_name"
    assert "is another model's name" in load(lora_name=MODEL, lora_path=folder).json()["error"]["message"]
    (tmp_path / "empty").mkdir()
    for name in ("none", "empty"):
        missing = load(lora_name="x", lora_path=str(tmp_path / name))
        assert (missing.status_code, missing.json()["error"]["param"]) == (400, "lora_path")
    tensor = peft_tensors(config_of(server), 1, modules=("q_proj",)).popitem()[1]
    wrong = peft_folder(tmp_path / "wrong", {"model.lora_C.weight": tensor})
    refused = load(lora_name="x", lora_path=str(wrong))
    assert (refused.status_code, "is none of an adapter's" in refused.text) == (400, True)
    assert load(lora_name="x", lora_path=folder).status_code == 200
    assert "load_inplace=True" in load(lora_name="x", lora_path=folder).json()["error"]["message"]
    assert load(lora_name="x", lora_path=folder, load_inplace=True).status_code == 200
    assert post(server, "unload_lora_adapter", lora_name="y").status_code == 404


def test_vectors_are_the_base_models(server, folder):
    post(server, "load_lora_adapter", lora_name="tuned", lora_path=folder)
    found = post(server, "embeddings", model="tuned", input="text").json()
    assert found["error"]["message"] == "model 'tuned' is an adapter; vectors are of its base, 'embedded'."


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ("--enable-lora --lora-modules folder", "lora_modules is 'folder'; it must be NAME=PATH"),
        ("--enable-lora --lora-modules a=x a=y", "lora_modules 'a' is there twice, or a model's name"),
        ("--enable-lora --lora-modules jattn=x", "lora_modules 'jattn' is there twice, or a model's name"),
        ('--enable-lora --lora-modules {"name":"a","path":"x","is_3d":true}', "lora_modules has the key 'is_3d'; an"),
        ('--enable-lora --lora-modules {"name":"a","path":""}', "lora_modules is .*; name and path must be there"),
        ('--enable-lora --lora-modules {"name":"a","path":7}', "lora_modules is .*; name and path must be there"),
        ('--enable-lora --lora-modules {"name":"a","path":"x"} a=y', "lora_modules 'a' is there twice"),
        ('--enable-lora --lora-modules {"name":', "lora_modules is not valid JSON"),
        ("--lora-modules a=x", "lora_modules is given; it needs --enable-lora"),
    ],
)
def test_modules_of_the_command_line_are_names_and_folders(arguments, refused, monkeypatch):
    monkeypatch.setattr("jattn.llm.serve.server.LLM", lambda *_, **__: pytest.fail("a model is loaded first"))
    with pytest.raises(ValueError, match=refused):
        main([*arguments.split(), "--port", "0"])
