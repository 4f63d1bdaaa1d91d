"""An encoder behind `jattn serve`'s application: vectors, and no generation."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient
from tokenizers import processors

from jattn.llm.engine import LLM
from jattn.llm.load import TextTokenizer
from jattn.llm.serve import AsyncLLM
from jattn.llm.serve.app import ServeConfig, create_app
from jattn.llm.serve.background import BackgroundServer
from tests.support.tiny_models import byte_tokenizer, tiny_config, tiny_model
from torch_core.base.errors import InvalidInput

NAME = "encoder"


@pytest.fixture(scope="module")
def llm() -> LLM:
    """An encoder of two layers; closed with its server."""
    config = tiny_config(is_encoder=True, position_embedding="learned", max_position_embeddings=32, eos_token_ids=())
    return LLM(tiny_model(config, 0), tokenizer=TextTokenizer(byte_tokenizer()))


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[httpx.Client]:
    with (
        BackgroundServer(AsyncLLM(llm), ServeConfig(model_name=NAME)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def test_it_gives_vectors(client: httpx.Client, llm: LLM) -> None:
    answer = client.post("/v1/embeddings", json={"model": NAME, "input": ["A list", "A tuple"], "pooling": "cls"})

    found = [each["embedding"] for each in answer.raise_for_status().json()["data"]]
    expected = [each.outputs.embedding for each in llm.embed(["A list", "A tuple"], pooling="cls")]
    np.testing.assert_array_equal(np.array(found, np.float32), expected)


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
        "model 'encoder' is an encoder, which generates nothing; ask /v1/embeddings."
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
