"""An encoder behind `jattn serve`'s application: vectors, and no generation."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient
from tokenizers import processors

from jattn.llm.engine import LLM
from jattn.llm.load import SentenceModules, TextTokenizer
from jattn.llm.serve import AsyncLLM
from jattn.llm.serve.app import create_app
from jattn.llm.serve.background import BackgroundServer
from jattn.llm.serve.config import ServeConfig
from tests.serve.conftest import MODEL
from tests.support.tiny_models import byte_tokenizer, tiny_config, tiny_model
from torch_core.base.errors import InvalidInput

NAME, SCORER = "encoder", "scorer"


@pytest.fixture(scope="module")
def llm() -> LLM:
    """An encoder of two layers; closed with its server."""
    config = tiny_config(is_encoder=True, position_embedding="learned", max_position_embeddings=32, eos_token_ids=())
    return LLM(tiny_model(config, 0), tokenizer=TextTokenizer(byte_tokenizer()))


@pytest.fixture(scope="module")
def scorer() -> LLM:
    """A cross-encoder of two layers."""
    config = tiny_config(
        is_encoder=True, position_embedding="learned", max_position_embeddings=32, eos_token_ids=(), num_labels=1
    )
    return LLM(tiny_model(config, 0), tokenizer=TextTokenizer(byte_tokenizer()))


@pytest.fixture(scope="module")
def client(llm: LLM, scorer: LLM) -> Iterator[httpx.Client]:
    more = {SCORER: AsyncLLM(scorer)}
    with (
        BackgroundServer(AsyncLLM(llm), ServeConfig(model_name=NAME), more) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def test_it_gives_vectors(client: httpx.Client, llm: LLM) -> None:
    answer = client.post("/v1/embeddings", json={"model": NAME, "input": ["A list", "A tuple"], "pooling": "cls"})

    found = [each["embedding"] for each in answer.raise_for_status().json()["data"]]
    expected = [each.outputs.embedding for each in llm.embed(["A list", "A tuple"], pooling="cls")]
    np.testing.assert_array_equal(np.array(found, np.float32), expected)


def test_a_text_begins_with_the_prompt_that_a_request_names(client, llm, monkeypatch) -> None:
    monkeypatch.setattr(llm, "sentence_modules", SentenceModules(prompts={"query": "q: "}))
    body = {"model": NAME, "input": "A list", "prompt_name": "query"}
    found = client.post("/v1/embeddings", json=body).raise_for_status().json()["data"][0]["embedding"]

    np.testing.assert_array_equal(np.array(found, np.float32), llm.embed("q: A list")[0].outputs.embedding)
    assert client.post("/v1/embeddings", json=body | {"prompt_name": "other"}).status_code == 400


@pytest.mark.parametrize("normalize", [True, False])
def test_shorter_vectors_are_the_first_elements(llm: LLM, normalize: bool) -> None:
    client = TestClient(create_app(AsyncLLM(llm), ServeConfig(model_name=NAME, matryoshka=True)))
    body = {"input": ["A list"], "dimensions": 5, "normalize": normalize}

    found = client.post("/v1/embeddings", json=body).raise_for_status().json()["data"][0]["embedding"]
    refused = client.post("/v1/embeddings", json=body | {"dimensions": 10_000})

    expected = llm.embed(["A list"], normalize=normalize)[0].outputs.embedding[:5]
    if normalize:
        expected = expected / np.linalg.norm(expected)
    np.testing.assert_array_equal(np.array(found, np.float32), expected)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "A list"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A list"}]}),
    ],
)
def test_generation_is_refused_by_name(path: str, body: dict, client: httpx.Client) -> None:
    answer = client.post(path, json={"model": NAME} | body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"
    assert answer.json()["error"]["message"] == (
        "model 'encoder' is an encoder, which generates nothing; ask /v1/embeddings or /v1/score."
    )


def test_all_else_that_needs_no_engine_is_served(client: httpx.Client) -> None:
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 32
    assert client.post("/tokenize", json={"model": NAME, "prompt": "ab"}).json()["count"] == 2
    assert client.get("/health").status_code == 200
    assert "jattn_refused_requests" in client.get("/metrics").text


def test_an_empty_text_has_the_vector_of_its_special_tokens_and_none_without(llm: LLM, client: httpx.Client) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    with LLM(llm.model, tokenizer=TextTokenizer(tokenizer)) as other:
        empty, alone = other.embed(["", [0]])

    assert empty.prompt_token_ids == (0,)
    np.testing.assert_array_equal(empty.outputs.embedding, alone.outputs.embedding)
    with pytest.raises(InvalidInput, match=r"^prompts\[1\] is empty; it needs at least one token\.$"):
        llm.embed(["A list", ""])
    assert client.post("/v1/embeddings", json={"model": NAME, "input": ["A list", ""]}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_scores_are_those_of_the_model_that_is_named(client: httpx.Client, llm: LLM, scorer: LLM, path, names) -> None:
    texts = dict(zip(names, ("A list", ["A tuple", "x"]), strict=True))

    for name, model in ((NAME, llm), (SCORER, scorer)):
        answer = client.post(path, json={"model": name, **texts}).raise_for_status().json()

        expected = [each.outputs.score for each in model.score("A list", ["A tuple", "x"])]
        assert (answer["model"], answer["object"]) == (name, "list")
        assert [each["score"] for each in answer["data"]] == expected
        assert [(each["index"], each["object"]) for each in answer["data"]] == [(0, "score"), (1, "score")]
        assert answer["usage"]["total_tokens"] == sum(
            len(each.prompt_token_ids) for each in model.score("A list", ["A tuple", "x"])
        )


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(client: httpx.Client, scorer: LLM, path) -> None:
    documents = ["A tuple", "x", "A list of lists"]
    body = {"model": SCORER, "query": "A list", "documents": [*documents[:2], {"text": documents[2]}]}

    answer = client.post(path, json=body).raise_for_status().json()
    first = client.post(path, json=body | {"top_n": 1, "return_documents": False}).raise_for_status().json()

    scores = [each.outputs.score for each in scorer.score("A list", documents)]
    order = sorted(range(3), key=lambda index: -scores[index])
    assert [each["index"] for each in answer["results"]] == order
    assert [each["relevance_score"] for each in answer["results"]] == [scores[index] for index in order]
    assert [each["document"]["text"] for each in answer["results"]] == [documents[index] for index in order]
    assert first["results"] == [{"index": order[0], "relevance_score": scores[order[0]]}]


def test_long_texts_are_cut_by_option(client: httpx.Client) -> None:
    text = "a" * 100
    for path, body in (
        ("/v1/embeddings", {"input": text}),
        ("/v1/score", {"text_1": "b", "text_2": text}),
        ("/v1/rerank", {"query": "b", "documents": [text]}),
    ):
        refused = client.post(path, json={"model": SCORER, **body})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        answer = client.post(path, json={"model": SCORER, **body, "truncate_prompt_tokens": -1})
        assert answer.raise_for_status().json()["usage"]["prompt_tokens"] == 32


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": 5, "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["x", 5]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["x"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"documents": ["x"]}, "query"),
    ],
)
def test_bad_scores_are_refused_by_field(client: httpx.Client, path, body, param) -> None:
    refused = client.post(path, json=body)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_several_models_are_listed_and_found_by_name(server, llm: LLM) -> None:
    config = ServeConfig(model_name=MODEL, max_unfinished=4)
    client = TestClient(create_app(server.llm, config, {NAME: AsyncLLM(llm)}))
    ask = {"prompt": "x", "max_tokens": 1}

    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == [MODEL, NAME]
    assert client.get(f"/v1/models/{NAME}").json()["max_model_len"] == 32
    answers = [client.post("/v1/completions", json=ask | more) for more in ({}, {"model": MODEL})]
    assert [each.raise_for_status().json()["model"] for each in answers] == [MODEL, MODEL]
    assert client.post("/v1/embeddings", json={"model": NAME, "input": "x"}).json()["model"] == NAME
    assert client.post("/tokenize", json={"model": NAME, "prompt": "x"}).json()["max_model_len"] == 32
    encoder = client.post("/v1/completions", json=ask | {"model": NAME})
    assert (encoder.status_code, encoder.json()["error"]["param"]) == (400, "model")
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/score"):
        unknown = client.post(path, json={"model": "other"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get("/v1/models/other").status_code == 404
    assert f'jattn_kv_cache_usage{{model_name="{MODEL}"}}' in client.get("/metrics").text
