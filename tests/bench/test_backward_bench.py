"""The benchmark of training without a device: its rows, its columns, what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jattn import cli
from jattn.bench import backward, measure
from torch_core.attention.call import DenseCall
from torch_core.base.specs import AttentionSpec


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "_call", lambda head_size, length: None)
    monkeypatch.setattr(backward, "in_graph", lambda call: lambda batches: 50.0)
    monkeypatch.setattr(backward, "_Step", _Timed)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for name, result in (("require_cuda", None), ("matmul_flops", 1e15), ("copy_bytes_per_second", 1e12)):
        monkeypatch.setattr(measure, name, lambda *_, result=result: result)
    monkeypatch.setattr(measure, "device_name", lambda: "a device")


class _Timed:
    def __init__(self, passes: str) -> None:
        self.sdpa = self.in_jax = lambda *_: 100.0


@pytest.mark.usefixtures("measured")
def test_flash_attention_4_is_a_column_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def columns() -> set[str]:
        return {name for name in backward.run(lengths=[8192], peers=True).columns if name.startswith("FA4")}

    monkeypatch.setattr(backward, "load_fa4", lambda: None)
    assert not columns()
    monkeypatch.setattr(backward, "load_fa4", object)
    assert columns() == {"FA4", "FA4 in any order"}


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(("passes", "timed"), [("forward", False), ("backward", True), ("both", True)])
def test_gradients_in_any_order_are_a_column(passes: Any, timed: bool) -> None:
    assert ("jattn in any order" in backward.run(lengths=[8192], passes=passes).columns) == timed


@pytest.mark.parametrize(("passes", "forwards"), [("backward", 1), ("both", 2)])
def test_flash_attention_4_runs_the_timed_passes(passes: str, forwards: int) -> None:
    seen: list[Any] = []

    def forward(query: Any, key: Any, value: Any, **_: Any) -> Any:
        seen.append("forward")
        return query, key[..., 0], None

    def backward_pass(*rows: Any, causal: bool, deterministic: bool) -> None:
        seen.append(([row.shape[:2] for row in rows], causal, deterministic))

    tokens = torch.zeros(8, 2, 4)
    starts = torch.tensor([0, 4, 8], dtype=torch.int32)
    call = DenseCall(
        query=tokens, key=tokens, value=tokens, query_start_loc=starts, key_start_loc=starts,
        spec=AttentionSpec(scale=1.0), max_query_len=4, max_key_len=4,
    )  # fmt: skip
    found = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward_pass)
    backward._Step(passes).fa4(found, call, deterministic=False)()
    assert seen == ["forward"] * forwards + [([(2, 4)] * 6, True, False)]


@pytest.mark.usefixtures("measured")
def test_every_time_stands_on_stderr_when_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    backward.run(lengths=[8192], passes="forward")

    assert capsys.readouterr().err == "8192, jattn: 50.0 us\n8192, jattn in JAX: 100.0 us\n"


@pytest.mark.nightly
@pytest.mark.usefixtures("measured")
def test_segments_are_timed_next_to_the_same_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "_segmented", lambda call: SimpleNamespace(segment_ids=None))
    report = backward.run(lengths=[8192], passes="both", segments=True)

    assert {"jattn segments", "jattn segments in JAX", "jattn in JAX"} <= report.rows[0].us.keys()


@pytest.mark.nightly
@pytest.mark.usefixtures("measured")
def test_rows_are_those_of_the_lengths_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "backward", "--lengths", "8192", "512", "--dropout", "0.1", "--peers"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["8192", "512"]
    assert "jattn dropout" in lines[1]
    assert "FA2 SDPA dropout takes 2.00 x the time of jattn" in lines[4]


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("passes", "elements"), [("forward", 192 + 128), ("backward", 3 * 192 + 2 * 128), ("both", 4 * 192 + 3 * 128)]
)
def test_keys_of_192_elements_have_values_of_128(passes: Any, elements: int) -> None:
    report = backward.run(lengths=[8192], head_size=192, passes=passes)

    assert "heads of 192 over values of 128" in report.name
    assert report.rows[0].operations == 16384 * 8192 * 16 * elements


def test_a_length_that_leaves_tokens_over_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "backward", "--lengths", "100"]) == 2

    error = "jattn: --lengths has 100; each must divide 16384, the tokens of a row.\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize("rate", ["1", "-0.1", "nan"])
def test_a_rate_that_is_no_share_of_the_weights_is_refused(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "backward", "--dropout", rate]) == 2

    assert capsys.readouterr().err.startswith(f"jattn: --dropout is {float(rate)}; it must be 0, for none, or")
