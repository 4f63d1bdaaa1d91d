"""The benchmark of attention to chosen latents without a device: what it times, and what it needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch

from jattn import cli
from jattn.bench import mla_sparse
from jattn.bench.mla import RANK, ROPE, SCALE
from torch_core.base.errors import Unsupported
from torch_core.latent.packed import pack_latents, unpack_latents


@pytest.fixture
def choice(seed: int) -> mla_sparse.Choice:
    random = torch.Generator().manual_seed(seed)
    latents = torch.randn(128, RANK + ROPE, generator=random).bfloat16()
    return mla_sparse.Choice(
        query=torch.randn(3, 2, RANK + ROPE, generator=random).bfloat16(),
        latents=latents,
        packed=pack_latents(*latents.split([RANK, ROPE], dim=-1)),
        slots=torch.rand(3, 128, generator=random).topk(5).indices.int(),
    )


def _expected(choice: mla_sparse.Choice, rows: torch.Tensor) -> torch.Tensor:
    chosen = rows.double()[choice.slots.long()]
    weights = (torch.einsum("thd,tkd->thk", choice.query.double(), chosen) * SCALE).softmax(-1)
    return torch.einsum("thk,tkd->thd", weights, chosen[..., :RANK]).bfloat16()


def test_a_token_attends_to_the_slots_that_it_chose(choice: mla_sparse.Choice) -> None:
    found = mla_sparse._ours(choice, choice.latents)()["out"]
    torch.testing.assert_close(found, _expected(choice, choice.latents))


def test_packed_rows_are_the_same_latents(choice: mla_sparse.Choice) -> None:
    found = mla_sparse._ours(choice, choice.packed)()["out"]
    torch.testing.assert_close(found, _expected(choice, unpack_latents(choice.packed, RANK, torch.bfloat16)))


def test_the_peer_finds_the_same_rows_in_its_blocks(choice: mla_sparse.Choice) -> None:
    def flash_mla(query: Any, cache: Any, *_: Any, indices: Any, **__: Any) -> Any:
        assert (query.shape, cache.shape, indices.shape) == ((3, 1, 2, 576), (2, 64, 1, 656), (3, 1, 5))
        return cache[indices // 64, indices % 64]

    found = SimpleNamespace(flash_mla=flash_mla, get_mla_metadata=lambda: (None, None))
    rows = mla_sparse._flash_mla_step(found, choice)()
    assert rows.flatten(1, 3).view(3, 5, 656).equal(choice.packed[choice.slots.long()])


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it would run")
def test_chosen_latents_are_measured_on_cuda() -> None:
    with pytest.raises(Unsupported, match="jattn bench mla-sparse measures CUDA kernels"):
        mla_sparse.run()


def test_a_number_below_1_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "mla-sparse", "--prompts", "0"]) == 2
    assert capsys.readouterr().err == "jattn: --prompts has 0; each must be at least 1.\n"
