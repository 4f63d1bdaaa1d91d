"""API keys: how a file says them, whose they are, and that tenants share no prefixes."""

from __future__ import annotations

import httpx
import pytest

from jattn.llm.engine import LLM, EngineConfig
from jattn.llm.serve import AsyncLLM
from jattn.llm.serve.background import BackgroundServer
from jattn.llm.serve.config import ServeConfig
from jattn.llm.serve.keys import KeyRing, read_keys
from torch_core.base.errors import InvalidInput

TENANTS = {"red-1": "red", "red-2": "red", "blue-1": "blue"}


def test_a_file_has_keys_or_keys_with_their_tenants(tmp_path) -> None:
    (tmp_path / "keys").write_text("# ours\nfirst\n\n  second  \n")
    (tmp_path / "tenants").write_text("red-1 red\n# theirs\nblue-1\tblue\n")

    assert read_keys(tmp_path / "keys") == ["first", "second"]
    assert read_keys(tmp_path / "tenants") == {"red-1": "red", "blue-1": "blue"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# none\n\n", r"has no keys\."),
        ("a\na\n", r"has a key twice\."),
        ("a red\nb\n", r"must have one key a line, followed on all lines or on none by its tenant's name\."),
        ("a b c\n", r"must have one key a line"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, text, message) -> None:
    (tmp_path / "keys").write_text(text)

    with pytest.raises(InvalidInput, match=message):
        read_keys(tmp_path / "keys")


def test_keys_of_one_tenant_are_one_and_keys_without_a_name_are_each_their_own() -> None:
    named, nameless = KeyRing(TENANTS), KeyRing(["red", "blue"])

    red, other_red, blue = (named.tenant(f"Bearer {key}") for key in TENANTS)
    assert red == other_red != blue
    assert len({red, blue, nameless.tenant("Bearer red"), nameless.tenant("Bearer blue")}) == 4
    assert [named.tenant(header) for header in ("", "Bearer", "Basic red-1", "Bearer red")] == [None] * 4
    assert not KeyRing([])


def test_tenants_need_keys() -> None:
    with pytest.raises(InvalidInput, match=r"isolate_tenants is True and there are no api_keys"):
        ServeConfig(model_name="x", isolate_tenants=True)


def test_tenants_share_no_prefixes_and_a_salt_parts_those_of_one() -> None:
    # Room for what everybody leaves behind.
    engine = EngineConfig(
        max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, num_blocks=65, num_scheduler_steps=1
    )
    config = ServeConfig(model_name="x", api_keys=TENANTS, isolate_tenants=True)
    body = {"prompt": list(range(1, 41)), "max_tokens": 1, "temperature": 0}

    with BackgroundServer(AsyncLLM(LLM(config=engine)), config) as server, httpx.Client(timeout=600) as client:

        def cached(key: str, **fields: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            answer = client.post(f"{server.url}/v1/completions", json=body | fields, headers=headers).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        asked = [("red-1", {}), ("blue-1", {}), ("red-2", {}), ("blue-1", {"cache_salt": "x"}), ("blue-1", {})]
        found = [cached(key, **fields) for key, fields in asked]

    # The second key of the first tenant, and the second request of the other one.
    assert found == [0, 0, 32, 0, 32]
