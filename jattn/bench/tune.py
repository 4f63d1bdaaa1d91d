"""Off-line work for the frozen tables: resources of compiled kernels, and the search of the Hopper tiles."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, replace
from json import dumps
from pathlib import Path
from typing import Any, Literal

import torch

from jattn.bench.report import BenchReport
from jattn.bench.runner import Benchmark, check_places
from jattn.bench.session import Session, in_graph
from jattn.table import aligned
from torch_core.attention.call import AttentionCall, DenseCall, PagedCall
from torch_core.attention.kernels.hopper.plan import HopperTile, hopper_launch
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec, AttentionSpec
from torch_core.launch.compile import KernelVariant, compile_variant, kernel_variant
from torch_core.launch.launcher import run_operation
from torch_core.launch.plan import DeviceLimits, OperationPlan
from torch_core.launch.planner import plan_call
from torch_core.variants import in_use, resources

#: Where in the source tree the result of each kind of work is kept.
PLACES = {"compile_table": "torch_core/variants/compiled.json", "hopper_tiles": "jattn/bench/hopper_tiles.json"}
#: Tokens of one sequence in each row of a search.
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
#: The candidates of the search, by head size.
CANDIDATES: dict[int, tuple[HopperTile, ...]] = {
    64: (
        HopperTile(2, 128, 4, 2, 232, 48, overlap=False),
        HopperTile(2, 128, 4, 2, 232, 48),
        HopperTile(3, 128, 4, 2, 160, 32, overlap=False),
        HopperTile(3, 128, 4, 2, 160, 32, ping_pong=False, overlap=False),
        HopperTile(2, 64, 4, 2, 232, 48),
        HopperTile(3, 64, 4, 2, 160, 32),
    ),
    128: (
        HopperTile(2, 64, 4, 2, 232, 48),
        HopperTile(2, 128, 2, 2, 232, 48),
        HopperTile(3, 64, 4, 1, 160, 32),
        HopperTile(3, 64, 4, 2, 160, 32),
        HopperTile(3, 64, 4, 2, 160, 32, ping_pong=False),
        HopperTile(3, 64, 4, 2, 160, 32, overlap=False),
    ),
    256: (
        HopperTile(2, 64, 2, 1, 232, 48, ping_pong=False, kv_heads=1),
        HopperTile(2, 64, 2, 1, 232, 48, kv_heads=1),
        HopperTile(2, 64, 2, 1, 240, 32, kv_heads=1),
    ),
}
_TOKENS, _HEADS, _KV_HEADS, _BLOCK = 16384, 32, 8, 16


def run(
    *,
    compile_table: bool = False,
    hopper_tiles: bool = False,
    head_size: Literal[64, 128, 256] | None = None,
    json: Path | None = None,
) -> str:
    """Does one kind of work, writes its results file, and returns the table.

    Args:
        compile_table: record registers, shared memory and spills of all variants; needs no GPU.
        hopper_tiles: time the candidate tiles of the Hopper prefill kernel.
        head_size: search this one only.
        json: the results file (compiled.json or hopper_tiles.json in the current directory).
    """
    if compile_table == hopper_tiles:
        raise InvalidInput("jattn bench tune needs one of --compile-table and --hopper-tiles.")
    place = PLACES["compile_table" if compile_table else "hopper_tiles"]
    path = json or Path(Path(place).name)
    check_places(json_path=path)
    if compile_table:
        text = _compile_table(path)
    else:
        reports = {size: search(size) for size in ([head_size] if head_size else CANDIDATES)}
        tiles = {size: {tile_name(tile): asdict(tile) for tile in CANDIDATES[size]} for size in reports}
        record = {size: {"tiles": tiles[size], **report.record()} for size, report in reports.items()}
        path.write_text(dumps(record, indent=1) + "\n")
        text = "\n\n".join(report.table() for report in reports.values())
    return f"{text}\nwrote {path}; to use it, put it in place of {place} in the source tree."


def _compile_table(path: Path) -> str:
    """Compiles every variant of `torch_core.variants.in_use` for sm_90, records the table and returns it as text."""
    table = resources.measure_all({label: variant for label, (variant, _) in in_use.variants_in_use().items()})
    resources.write_table(table, path)
    cells = [(label, *map(str, astuple(row))) for label, row in table.resources.items()]
    heads = ("variant", "registers", "shared memory", "spilled", "warps")
    return "\n".join(aligned([heads, *cells], right=range(1, 5)))


def search(head_size: int, *, lengths: Sequence[int] = LENGTHS) -> BenchReport:
    """Times every candidate by graph replay: causal, bfloat16, 16k tokens, 32 query heads, 8 key/value heads.

    A row is for a length, which divides 16384, dense or over blocks of 16; a column for a candidate, by `tile_name`.
    """
    session = Session("tune")
    _compile_together(head_size, lengths)
    for length in lengths:
        operations = 2.0 * _TOKENS * length * _HEADS * head_size
        for paged in (False, True):
            columns = {
                tile_name(tile): in_graph(functools.partial(_call, plan))
                for tile, plan in plans(head_size, length, paged=paged).items()
            }
            row = session.rate_row(f"{length} {'paged' if paged else 'dense'}", operations)
            session.add(row, columns, [length] * 2, place=str(length))
    return session.report(f"tiles of the Hopper prefill kernel, heads of {head_size}, TFLOP/s")


def plans(head_size: int, length: int, *, paged: bool) -> dict[HopperTile, OperationPlan]:
    """Returns the plan of each candidate for a batch of sequences of `length` tokens; needs no device."""
    num_seqs = _TOKENS // length
    starts = ArraySpec((num_seqs + 1,), "int32")
    common: dict[str, Any] = {
        "query": ArraySpec((_TOKENS, _HEADS, head_size), "bfloat16"),
        "query_start_loc": starts,
        "spec": AttentionSpec(scale=head_size**-0.5),
        "max_query_len": length,
    }
    if paged:
        call: AttentionCall[ArraySpec] = PagedCall(
            kv_cache=ArraySpec((_TOKENS // _BLOCK, 2, _BLOCK, _KV_HEADS, head_size), "bfloat16"),
            block_tables=ArraySpec((num_seqs, length // _BLOCK), "int32"),
            seq_lens=ArraySpec((num_seqs,), "int32"),
            **common,
        )
    else:
        key = ArraySpec((_TOKENS, _KV_HEADS, head_size), "bfloat16")
        call = DenseCall(key=key, value=key, key_start_loc=starts, **common)
    base = plan_call(call)
    min_query = dict(base.launches[0].constexprs)["MIN_QUERY"]
    found = {}
    for tile in CANDIDATES[head_size]:
        launch = hopper_launch(call, DeviceLimits(), min_query=min_query, tile=tile)
        if launch is not None:
            found[tile] = replace(base, launches=(launch, *base.launches[1:]))
    return found


def tile_name(tile: HopperTile) -> str:
    """Returns the column of a tile: warpgroups x keys x stages x query stages, registers, switches, heads side by side.

    Example:
        >>> tile_name(HopperTile(3, 64, 4, 1, 160, 24))
        '3x64x4x1 r160 po h2'
    """
    shape = f"{tile.warpgroups}x{tile.block_n}x{tile.stages}x{tile.query_stages}"
    switches = ("p" if tile.ping_pong else "") + ("o" if tile.overlap else "")
    return f"{shape} r{tile.consumer_registers} {switches or '-'} h{tile.kv_heads}"


def _compile_together(head_size: int, lengths: Sequence[int]) -> None:
    """Fills Triton's disk cache from one process for each processor: a tile takes ten seconds to compile."""
    jobs: dict[KernelVariant, tuple[int, int, bool, HopperTile]] = {}
    for length in lengths:
        for paged in (False, True):
            for tile, plan in plans(head_size, length, paged=paged).items():
                jobs.setdefault(kernel_variant(plan.launches[0], plan.specs), (head_size, length, paged, tile))
    # Forked processes would inherit a CUDA context that they cannot use.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(_compile, *arguments) for arguments in jobs.values()]:
            job.exception()  # A tile that does not compile fails again, and is noted, when its turn comes.


def _compile(head_size: int, length: int, paged: bool, tile: HopperTile) -> None:
    plan = plans(head_size, length, paged=paged)[tile]
    compile_variant(kernel_variant(plan.launches[0], plan.specs), DeviceLimits().arch)


def _call(plan: OperationPlan, length: int) -> Callable[[], Any]:
    tensors = {name: _tensor(name, spec, length) for name, spec in plan.inputs}
    out = {name: torch.empty(spec.shape, dtype=torch.bfloat16, device="cuda") for name, spec in plan.outputs}
    return lambda: run_operation(plan, tensors, out)


def _tensor(name: str, spec: ArraySpec, length: int) -> torch.Tensor:
    if name in ("query_start_loc", "key_start_loc"):
        return torch.arange(0, _TOKENS + 1, length, dtype=torch.int32, device="cuda")
    if name == "seq_lens":
        return torch.full(spec.shape, length, dtype=torch.int32, device="cuda")
    if name == "block_tables":
        return torch.randperm(_TOKENS // _BLOCK, device="cuda").to(torch.int32).reshape(spec.shape)
    return torch.randn(spec.shape, dtype=torch.bfloat16, device="cuda")


BENCHMARK = Benchmark("tune", __doc__, run)
