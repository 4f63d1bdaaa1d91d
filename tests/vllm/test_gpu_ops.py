"""vLLM's operations give on a CUDA device what they give on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torch_core.vllm import ops
from torch_core.vllm.ops import prefix_prefill

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, HEAD, BLOCK = 8, 2, 64, 16
FP8 = torch.float8_e4m3fn
STARTS, SEQ_LENS = torch.tensor([0, 40, 41, 105]), torch.tensor([100, 77, 64])
TABLES = torch.tensor([[3, 1, 4, 15, 9, 2, 6], [5, 35, 8, 7, 10, 0, 0], [11, 12, 13, 14, 0, 0, 0]])


def tensors(*shapes: tuple[int, ...], seed: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def packed(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    q, k, v, keys, values = tensors(
        (105, HEADS, HEAD), *[(105, KV_HEADS, HEAD)] * 2, *[(40, BLOCK, KV_HEADS, HEAD)] * 2
    )
    named = {"q": q, "k": k, "v": v, "keys": keys, "values": values}
    # Coded once, from float32, so that all dtypes read the same cache.
    coded = {"coded keys": keys.to(FP8).to(device), "coded values": values.to(FP8).to(device)}
    return {**{name: tensor.to(device, dtype) for name, tensor in named.items()}, **coded}


def unified(device: str, dtype: torch.dtype) -> torch.Tensor:
    x = packed(device, dtype)
    k_descale, v_descale = (
        torch.rand(3, KV_HEADS, generator=torch.Generator().manual_seed(seed)) + 0.5 for seed in (1, 2)
    )
    out = torch.empty_like(x["q"])
    ops.unified_attention(
        x["q"], x["coded keys"], x["coded values"], out, STARTS.int().to(device), 64, SEQ_LENS.int().to(device),
        100, 0.125, True, (-1, -1), TABLES.int().to(device), 0, None, k_descale.to(device), v_descale.to(device),
    )  # fmt: skip
    return out


def diffkv(device: str, dtype: torch.dtype) -> torch.Tensor:
    x = packed(device, dtype)
    out = torch.empty(105, HEADS, 32, device=device, dtype=dtype)
    ops.unified_attention_diffkv(
        x["q"], x["keys"], x["values"][..., :32], out, STARTS.int().to(device), SEQ_LENS.int().to(device), 0.125, True,
        (40, 0), TABLES.int().to(device), 0,
    )  # fmt: skip
    return out


def decode(device: str, dtype: torch.dtype) -> torch.Tensor:
    x = packed(device, dtype)
    out, lse = torch.empty_like(x["q"][:3]), torch.empty(3, HEADS, device=device)
    ops.decode_attention_fwd(
        x["q"][:3], x["keys"], x["values"], out, lse, TABLES.to(device), SEQ_LENS.to(device), None, 4, 0.125, BLOCK
    )
    return torch.cat([out.float(), lse[..., None]], -1)


def prefix(device: str, dtype: torch.dtype) -> torch.Tensor:
    x = packed(device, dtype)
    by_x = x["keys"].view(40, BLOCK, KV_HEADS, HEAD // 8, 8).permute(0, 2, 3, 1, 4).contiguous()
    caches = by_x, x["values"].permute(0, 2, 3, 1).contiguous()
    arrays = TABLES.to(device), STARTS.to(device), SEQ_LENS.to(device)
    out = torch.zeros_like(x["q"])
    prefix_prefill.context_attention_fwd(
        x["q"], x["k"], x["v"], out, "auto", *caches, *arrays, 100, 64, None, None, sliding_window=50
    )
    return out


def chunked(device: str, dtype: torch.dtype) -> torch.Tensor:
    x = packed(device, dtype)
    caches = x["coded keys"].permute(0, 2, 1, 3), x["coded values"].permute(0, 2, 1, 3)
    arrays = TABLES.to(device), STARTS.to(device), SEQ_LENS.to(device)
    out, one = torch.zeros_like(x["q"]), torch.ones(1, device=device)
    ops.chunked_prefill_paged_decode(x["q"], x["k"], x["v"], out, "fp8", *caches, *arrays, 100, 64, one, one)
    return out


def padded(device: str, dtype: torch.dtype, rows: int = 105) -> torch.Tensor:
    starts, lens = torch.tensor([2, rows * 3 // 4, rows - 15]), torch.tensor([rows // 4, 5, 15])
    x = [tensor.to(device, dtype) for tensor in tensors((rows, HEADS, HEAD), *[(rows, KV_HEADS, HEAD)] * 2)]
    inside = torch.zeros(rows, dtype=torch.bool)
    for start, length in zip(starts.tolist(), lens.tolist(), strict=True):
        inside[start : start + length] = True
    for tensor in x:
        tensor[~inside.to(device)] = torch.nan
    out = torch.full_like(x[0], torch.nan)
    ops.context_attention_fwd(x[0], x[1], x[2], out, starts.to(device), lens.to(device), rows // 4)
    return out


def wide(device: str, dtype: torch.dtype) -> torch.Tensor:
    x = [tensor.to(device, dtype) for tensor in tensors((3, HEADS, 576), (40, BLOCK, KV_HEADS, 576))]
    out, lse = torch.empty(3, HEADS, 512, device=device, dtype=dtype), torch.empty(3, HEADS, device=device)
    ops.decode_attention_fwd(
        x[0], x[1], x[1][..., :512], out, lse, TABLES[..., None].to(device), SEQ_LENS.to(device), None, 4, 0.04, BLOCK
    )
    return torch.cat([out.float(), lse[..., None]], -1)


def overlapping(device: str, dtype: torch.dtype) -> torch.Tensor:
    x = [tensor.to(device, dtype) for tensor in tensors((700, HEADS, HEAD), *[(700, KV_HEADS, HEAD)] * 2)]
    starts, lens = torch.tensor([450, 0, 0, 300]), torch.tensor([250, 200, 310, 170])
    out = torch.full_like(x[0], torch.nan)
    ops.context_attention_fwd(x[0], x[1], x[2], out, starts.to(device), lens.to(device), 310, is_causal=False)
    return out


RUNS: dict[str, Callable[[str, torch.dtype], torch.Tensor]] = {
    "descales by sequence and head": unified,
    "values of another size": diffkv,
    "one query of each sequence": decode,
    "one query of wide heads": wide,
    "sequences in any order that overlap": overlapping,
    "a cached prefix": prefix,
    "chunks and decodes": chunked,
    "padding between sequences": padded,
    "padding between long sequences": lambda device, dtype: padded(device, dtype, 1200),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_operation_gives_what_the_cpu_gives(name):
    run = RUNS[name]

    exact, rounded, found = run("cpu", torch.float32), run("cpu", torch.bfloat16), run("cuda", torch.bfloat16)

    reference_error = (rounded.float() - exact).abs().max().item()
    bound = 2 * (reference_error + torch.finfo(torch.bfloat16).eps * exact.abs().max().item())
    assert (found.float().cpu() - exact).abs().max().item() <= bound


def test_the_operations_read_nothing_back_from_the_device():
    # A graph cannot hold what waits for the device.
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    x = packed("cuda", torch.bfloat16)
    cache = x["coded keys"]
    lens, starts, tables = SEQ_LENS.int().cuda(), STARTS.int().cuda(), TABLES.int().cuda()
    descale, out = torch.rand(3, KV_HEADS, device="cuda") + 0.5, torch.empty_like(x["q"])

    def step() -> None:
        ops.unified_attention(
            x["q"], cache, cache, out, starts, 64, lens, 100, 0.125, True, (-1, -1), tables, 0, None, descale, descale
        )

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    expected = out.clone()
    with torch.cuda.graph(graph):
        step()
    out.zero_()
    graph.replay()

    assert torch.equal(out, expected)
