"""The example for Ray Serve without Ray: its settings, and the application of one replica."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from starlette.testclient import TestClient

from examples import ray_serve
from examples.ray_serve import Settings
from torch_core.base.errors import InvalidInput


def test_settings_come_as_text_and_give_each_replica_its_gpus() -> None:
    options = Settings.of({"num_replicas": "4", "tensor_parallel_size": "2"}).deployment

    assert (options["num_replicas"], options["ray_actor_options"]) == (4, {"num_gpus": 2})
    assert Settings.of({"num_gpus": 0}).deployment["ray_actor_options"] == {"num_gpus": 0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": 2}, "replicas is no setting; there are model, num_replicas"),
        ({"num_replicas": "two"}, r"settings are .* all but model are whole numbers"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
    ],
)
def test_what_is_no_setting_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{message}"):
        ray_serve.build(given)


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without_ray(name: str, *more: Any, **options: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return found(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(ImportError, match=r"pip install 'ray\[serve\]'"):
        ray_serve.build({})


@pytest.mark.nightly
def test_a_replica_answers_as_the_server_does() -> None:
    with TestClient(ray_serve.engine_app(Settings(max_num_seqs=2))) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == "jattn"
