"""Several GPUs: the tokens and arrays of one. With a single GPU the same paths run over a mesh of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jattn import AttentionMetadata, SequenceRow, ops, parallel
from jattn.llm.engine import Engine, EngineConfig, SamplingParams, open_engine
from jattn.pool import HostBlocks, KVPool
from tests.engine.conftest import tiny_decoder
from tests.engine.test_annotated_models import Annotated, check_collectives
from tests.engine.test_annotated_models import config as annotated_config
from tests.engine.test_engine import GREEDY, prompts_of, run
from tests.engine.test_processes import PROMPT, free_port
from torch_core.attention.call import PagedCall
from torch_core.base.specs import AttentionSpec, KVCacheSpec
from torch_core.cache import BlockSwap
from torch_core.cache_writes.call import WriteCall

pytestmark = pytest.mark.gpu

TWO_GPUS = pytest.mark.skipif("len(jax.devices()) < 2", reason="needs two GPUs")
SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


def mesh_of(name: str) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:2], object), (name,))


@pytest.mark.parametrize(("way", "count"), [("tp", 2), ("dp", 2), ("tp", 4), ("dp", 4)])
def test_greedy_tokens_are_those_of_one_gpu(way: str, count: int) -> None:
    if count > 2 and len(jax.devices()) < count:
        pytest.skip(f"needs {count} GPUs")
    model = tiny_decoder(hidden_size=64, head_dim=16, implementation="triton")
    prompts = prompts_of(1, 3, 9, 17, 30, 8, 5)
    devices = np.asarray(jax.devices()[:count], object)
    mesh = Mesh(devices.reshape(1, -1) if way == "tp" else devices.reshape(-1, 1), ("dp", "tp"))

    with open_engine(model, EngineConfig(**SIZES, mesh=mesh)) as engine:
        requests = [engine.add(prompt, GREEDY) for prompt in prompts]
        while engine.num_unfinished:
            engine.step()
    assert [each.output_token_ids for each in requests] == run(Engine(model, EngineConfig(**SIZES)), prompts)


@TWO_GPUS
def test_tokens_dealt_out_over_gpus_with_the_same_key_head_are_those_of_one() -> None:
    model = tiny_decoder(hidden_size=64, head_dim=16, num_key_value_heads=1, implementation="triton")
    prompts = prompts_of(1, 3, 9, 17, 30, 8, 5)
    spread = EngineConfig(**SIZES, tensor_parallel_size=2, decode_context_parallel_size=2)

    assert run(Engine(model, spread), prompts) == run(Engine(model, EngineConfig(**SIZES)), prompts)


@TWO_GPUS
def test_a_module_that_is_cut_by_its_annotations_has_the_tokens_of_one_gpu() -> None:
    model, prompts = Annotated(), prompts_of(1, 3, 9, 17, 30, 8, 5)
    two = Engine(model, annotated_config(2))

    assert run(two, prompts) == run(Engine(model, annotated_config(1)), prompts)
    check_collectives(two)


@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("way", ["whole heads", "split heads", "chunk"])
def test_a_step_on_spread_sequences_is_that_of_one_gpu(way: str, by_kernels: bool) -> None:
    mesh, rng = mesh_of("cp"), np.random.default_rng(3)
    peers = parallel.Peers.of(mesh, "cp") if by_kernels else None
    world = mesh.size
    rows = [SequenceRow(list(range(1, 40)), 600 * world, 1), SequenceRow([40, 41], 9, 5), SequenceRow([42], 0, 7)]
    sizes: dict[str, Any] = {"block_size": 16 * world, "num_blocks": 48, "num_tokens": 16}
    step = AttentionMetadata.build(rows, **sizes)
    shapes = ((48, 2, 16 * world, 2, 64), (16, 8, 64), (16, 2, 64), (16, 2, 64))
    cache, query, key, value = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)

    def attend(table: Any, cache: Any, query: Any, key: Any, value: Any, step: Any, is_spread: bool = True) -> Any:
        write = WriteCall(key=key, value=value, slot_mapping=step.slot_mapping, kv_cache=cache)
        call = PagedCall(
            query=query,
            kv_cache=cache,
            block_tables=step.block_tables,
            seq_lens=step.seq_lens,
            query_start_loc=step.query_start_loc,
            spec=AttentionSpec(scale=0.125),
            max_query_len=step.max_query_len,
            with_lse=True,
        )
        if not is_spread:
            written = ops.run(write, "xla")
            found = ops.run(call.with_arrays(written), "xla")
            return found["out"], found["lse"], written["kv_cache"]
        written = parallel.write_kv_cache(write, "cp")
        options: dict[str, Any] = {"split_heads": way == "split heads", "new": (key, value) if way == "chunk" else None}
        found = parallel.paged_attention(call.with_arrays(written), "cp", peers=table, **options)
        return found["out"], found["lse"], written["kv_cache"]

    exact = attend(None, cache, query, key, value, step, False)
    # Token t of a block lives on device t % world.
    dealt = cache.reshape(48, 2, 16, world, 2, 64)
    spread = jnp.moveaxis(dealt, 3, 0).reshape(world * 48, *dealt.shape[1:3], 2, 64)
    whole, parts = PartitionSpec(), PartitionSpec("cp")
    heads = PartitionSpec(None, "cp") if way == "split heads" else whole
    mapped = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(parts, parts, heads, whole, whole, whole),
        out_specs=(heads, heads, parts),
        check_vma=False,
    )
    table = None if peers is None else peers.table
    out, lse, written = jax.jit(mapped)(table, spread, query, key, value, step)

    np.testing.assert_allclose(out, exact[0], atol=1e-5)
    np.testing.assert_allclose(lse, exact[1], atol=1e-5)
    back = jnp.moveaxis(jnp.asarray(np.asarray(written)).reshape(world, 48, 2, 16, 2, 64), 0, 3)
    np.testing.assert_array_equal(back.reshape(cache.shape), exact[2])


@pytest.mark.parametrize("way", ["ring", "gathered"])
def test_a_split_prompt_has_the_result_and_gradients_of_one_gpu(way: str) -> None:
    mesh, rng = mesh_of("cp"), np.random.default_rng(4)
    length = 512
    given = [jnp.asarray(rng.normal(size=(1, length, heads, 64)), jnp.bfloat16) for heads in (8, 2, 2)]
    order = parallel.zigzag_order(length, mesh.size)
    attend = {"ring": parallel.ring_attention, "gathered": parallel.all_gather_attention}[way]
    tokens = PartitionSpec(None, "cp")
    options: dict[str, Any] = {"mesh": mesh, "in_specs": tokens, "out_specs": tokens, "check_vma": False}
    split = jax.shard_map(lambda *arrays: attend(*arrays, "cp"), **options)

    def whole(implementation: str | None) -> Any:
        starts = jnp.array([0, length], jnp.int32)
        sizes: dict[str, Any] = {"max_query_len": length, "implementation": implementation}
        return lambda query, key, value: ops.attention(query[0], key[0], value[0], starts, **sizes)[None]

    def derived(function: Any, arrays: Any) -> Any:
        return jax.vjp(function, *arrays)[1](jnp.ones_like(arrays[0]))

    exact = derived(whole("xla"), [x.astype(jnp.float32) for x in given])
    alone = derived(whole(None), given)
    spread = [jax.device_put(x[:, order], NamedSharding(mesh, tokens)) for x in given]
    found = [np.asarray(x)[:, np.argsort(order)] for x in jax.jit(lambda *x: derived(split, x))(*spread)]
    for mine, plain, truth in zip(found, alone, exact, strict=True):
        truth = np.asarray(truth, np.float64)
        bound = 2 * (np.abs(np.asarray(plain, np.float64) - truth).max() + 2.0**-8 * np.abs(truth).max())
        assert np.abs(np.asarray(mine, np.float64) - truth).max() <= bound


def test_a_pool_over_gpus_copies_scrubs_and_swaps_in_place() -> None:
    mesh = mesh_of("tp")
    spec = KVCacheSpec(num_kv_heads=2, head_size=16, block_size=4, dtype="float32")
    sharding = NamedSharding(mesh, PartitionSpec(None, None, None, "tp"))
    pool = KVPool(spec, num_layers=2, num_blocks=8, device=sharding)
    number = jnp.arange(8.0)[:, None, None, None, None]
    step = jax.jit(lambda caches: (None, [cache + number for cache in caches]), donate_argnums=0)
    before = pool.addresses()
    pool.run(step)
    host = HostBlocks(pool, 2)

    pool.copy_blocks([(1, 2)])
    host.execute([BlockSwap(device_block=3, host_block=1, to_host=True)])
    pool.scrub_blocks([3])
    host.execute([BlockSwap(device_block=5, host_block=1, to_host=False)])

    for layer in pool.read_blocks([2, 3, 5]):
        for block, content in zip(layer, (1, 0, 3), strict=True):
            np.testing.assert_array_equal(block, np.full(block.shape, content, np.float32))
    assert pool.addresses() == before


def start(gpu: int, *arguments: str) -> subprocess.Popen[str]:
    """A process that generates on one GPU."""
    command = [sys.executable, "-m", "jattn", "generate", "--prompt", PROMPT, *arguments]
    # The tests' own process has most of both GPUs.
    environment = {"CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=pipe, stderr=pipe, text=True)


def start_two(*arguments: str) -> list[subprocess.Popen[str]]:
    """Two processes that generate with one model, a GPU each."""
    joined = ("--tensor-parallel-size", "2", "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2")
    return [start(process, *joined, "--process-id", str(process), *arguments) for process in (0, 1)]


@TWO_GPUS
def test_two_processes_with_a_gpu_each_say_what_one_says() -> None:
    arguments = ("--max-tokens", "16", "--json")
    said = []
    for processes in (start_two(*arguments), [start(0, *arguments)]):
        try:
            texts = [process.communicate(timeout=100) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert not any(process.returncode for process in processes), texts
        out = texts[0][0]
        said.append(json.loads(out[out.index("{") :])["outputs"][0]["token_ids"])
    assert said[0] == said[1]


@TWO_GPUS
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_of_two_dies_the_other_ends_with_an_error_within_a_minute(victim: int) -> None:
    processes = start_two("--max-tokens", "900")
    try:
        assert processes[0].stdout is not None
        processes[0].stdout.read(len(PROMPT) + 60)
        processes[victim].kill()
        died = time.monotonic()
        code = processes[1 - victim].wait(timeout=100)
    finally:
        for process in processes:
            process.kill()
            process.communicate()

    assert code != 0
    assert time.monotonic() - died < 60


def test_sampling_over_gpus_draws_the_tokens_of_one() -> None:
    model = tiny_decoder(hidden_size=64, head_dim=16, implementation="triton")
    params = SamplingParams(temperature=0.8, top_k=7, max_tokens=8, seed=3, ignore_eos=True)
    prompts = prompts_of(2, 5, 11)

    spread = Engine(model, EngineConfig(**SIZES, mesh=mesh_of("tp")))
    assert run(spread, prompts, params) == run(Engine(model, EngineConfig(**SIZES)), prompts, params)
