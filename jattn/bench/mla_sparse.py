"""Attention to chosen latents, of prompts and of decode steps, next to FlashMLA's two sparse kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jattn.bench import measure
from jattn.bench.mla import BLOCK, RANK, ROPE, SCALE
from jattn.bench.peers import flash_mla_sparse
from jattn.bench.report import OURS, BenchReport
from jattn.bench.runner import Benchmark
from jattn.bench.session import Column, Session, in_graph
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import AttentionSpec
from torch_core.latent.call import LatentCall
from torch_core.latent.packed import pack_latents
from torch_core.launch.run import run as run_call

#: Tokens of each prompt, and sequences of each decode step, in the rows of the default table.
PROMPTS = (4096, 16384)
SEQUENCES = (64, 128)
HEADS = (128, 64)
#: Latents of a prompt and of each sequence of a decode step, and how many of them a query token chooses.
PROMPT_LATENTS, STEP_LATENTS = 32768, 8192
TOPK = 2048
_PACKED = f"{OURS} packed"
# Tokens that choose in one sort.
_TOGETHER = 512


@dataclass(frozen=True, slots=True)
class Choice:
    """Query tokens, and the latents that they choose.

    Attributes:
        query: [tokens, heads, 576].
        latents: bfloat16 [slots, 576].
        packed: the same as packed rows, uint8 [slots, 656].
        slots: int32 [tokens, 2048], in random order.
    """

    query: torch.Tensor
    latents: torch.Tensor
    packed: torch.Tensor
    slots: torch.Tensor


def run(
    *,
    prompts: Sequence[int] = PROMPTS,
    sequences: Sequence[int] = SEQUENCES,
    heads: Sequence[int] = HEADS,
    peers: Path | None = None,
) -> BenchReport:
    """Measures the attention alone, whose slots are given: rank 512, rotary keys of 64, bfloat16 queries, 2,048 chosen.

    A prompt's tokens choose from the same 32,768 latents, each sequence of a decode step from 8,192 of its own.
    FlashMLA's kernel for prompts takes bfloat16 latents, its kernel for decode steps packed rows.

    Args:
        prompts: tokens of each prompt; several are several rows.
        sequences: sequences of each decode step.
        heads: query heads.
        peers: a folder with bench_peers.py; see `jattn.bench.peers.load_peers`.
    """
    for name, values in (("prompts", prompts), ("sequences", sequences), ("heads", heads)):
        if min(values, default=1) < 1:
            raise InvalidInput(f"--{name} has {min(values)}; each must be at least 1.")
    session = Session("mla-sparse", peers)
    ours: dict[str, Column] = {
        OURS: in_graph(lambda choice: _ours(choice, choice.latents)),
        _PACKED: in_graph(lambda choice: _ours(choice, choice.packed)),
    }
    of_prompts, of_steps = {}, {}
    if session.peers is not None:
        of_prompts["FlashMLA"] = in_graph(_flash_mla_prompt)
        of_steps["FlashMLA packed"] = in_graph(lambda choice: _flash_mla_step(session.peers, choice))
    for num_heads in heads:
        for tokens in prompts:
            choices = [_choice(1, tokens, PROMPT_LATENTS, num_heads) for _ in range(2)]
            _add(session, f"prompt of {tokens}, {num_heads} heads", ours | of_prompts, choices)
        for num_seqs in sequences:
            first = _choice(num_seqs, 1, STEP_LATENTS, num_heads)
            # The rows that one step reads: the smaller ones, so that no rotation finds them in L2.
            others = range(1, measure.num_pools(num_seqs * TOPK * first.packed.shape[1]))
            choices = [first, *(_choice(num_seqs, 1, STEP_LATENTS, num_heads) for _ in others)]
            _add(session, f"{num_seqs} sequences, {num_heads} heads", ours | of_steps, choices)
    return session.report("attention to 2048 chosen latents, TFLOP/s", compared=_compared)


def _compared(name: str) -> str | None:
    return {"FlashMLA": OURS, "FlashMLA packed": _PACKED}.get(name)


def _add(session: Session, label: str, columns: dict[str, Column], choices: list[Choice]) -> None:
    tokens, num_heads, _ = choices[0].query.shape
    row = session.rate_row(label, 2.0 * tokens * num_heads * TOPK * (2 * RANK + ROPE))
    session.add(row, columns, choices, required=(OURS, _PACKED))


def _choice(num_seqs: int, new: int, latents_of_each: int, num_heads: int) -> Choice:
    """Returns random queries and latents; each token's choice is within those of its sequence."""
    latents = torch.randn(num_seqs * latents_of_each, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
    packed = [pack_latents(*part.split([RANK, ROPE], dim=-1)) for part in latents.split(PROMPT_LATENTS)]
    first = torch.arange(num_seqs, device="cuda").repeat_interleave(new)[:, None] * latents_of_each
    slots = [
        torch.rand(len(part), latents_of_each, device="cuda").topk(TOPK).indices + part
        for part in first.split(_TOGETHER)
    ]
    return Choice(
        query=torch.randn(num_seqs * new, num_heads, RANK + ROPE, device="cuda", dtype=torch.bfloat16),
        latents=latents,
        packed=torch.cat(packed),
        slots=torch.cat(slots).int(),
    )


def _ours(choice: Choice, cache: torch.Tensor) -> Callable[[], Any]:
    """Returns the call that `sparse_mla_attention` makes, after its look-up of slots."""
    tokens, topk = choice.slots.shape
    places = {"device": choice.slots.device, "dtype": torch.int32}
    call = LatentCall(
        query=choice.query,
        latent_cache=cache[:, None],
        kv_lora_rank=RANK,
        block_tables=choice.slots,
        seq_lens=torch.full((tokens,), topk, **places),
        query_start_loc=torch.arange(tokens + 1, **places),
        spec=AttentionSpec(scale=SCALE, causal=False),
        max_query_len=1,
        out=choice.query.new_empty(*choice.query.shape[:2], RANK),
    )
    return lambda: run_call(call)


def _flash_mla_prompt(choice: Choice) -> Callable[[], Any]:
    attend = flash_mla_sparse()
    return lambda: attend(choice.query, choice.latents[:, None], choice.slots[:, None], SCALE)


def _flash_mla_step(found: Any, choice: Choice) -> Callable[[], Any]:
    query, cache = choice.query[:, None], choice.packed.view(-1, BLOCK, 1, choice.packed.shape[1])
    # It plans its work by the first call's lengths and is told to keep that plan.
    plan, _ = found.get_mla_metadata()
    options = {"softmax_scale": SCALE, "is_fp8_kvcache": True, "indices": choice.slots[:, None]}
    return lambda: found.flash_mla(query, cache, None, None, RANK, plan, **options)


BENCHMARK = Benchmark("mla-sparse", __doc__, run, may_be_empty=("prompts", "sequences"))
