"""The engine: same tokens whatever the batching, typed refusals at the door."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.llm.engine import Engine, EngineConfig, SamplingParams
from jattn.llm.engine.scheduler import ScheduledStep
from jattn.llm.models import Decoder
from tests.engine.conftest import greedy_kind, tiny_decoder
from torch_core.base.errors import InvalidInput, RequestTooLong

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    requests = [engine.add(prompt, params) for prompt in prompts]
    while engine.num_unfinished:
        engine.step()
    return [request.output_token_ids for request in requests]


@functools.cache
def compiled_forward(decoder: Decoder) -> Callable[[np.ndarray], jax.Array]:
    return jax.jit(decoder.forward_dense)


def dense_greedy(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by running the whole sequence again for each, without any cache."""
    tokens = list(prompt)
    forward = compiled_forward(decoder)
    for _ in range(count):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(jnp.argmax(forward(padded)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 97, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def engine(decoder: Decoder) -> Engine:
    return Engine(decoder, EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=32))


def test_cached_generation_equals_running_the_whole_sequence_again(engine, decoder, seed) -> None:
    prompts = prompts_of(seed, 1, 3, 4, 5, 17)

    assert run(engine, prompts) == [dense_greedy(decoder, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 4},
        {"steps_in_flight": 1},
        {"num_scheduler_steps": 1},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 1, "max_num_batched_tokens": 8},
        {"block_size": 16},
        # 11 usable blocks of 4: four requests of up to 8 blocks cannot all stay, so some are preempted.
        {"num_blocks": 12},
        {"num_blocks": 12, "steps_in_flight": 1},
        {"num_blocks": 12, "num_host_blocks": 12},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_the_engine_batches(engine, decoder, changes, seed) -> None:
    prompts = prompts_of(seed, 20, 2, 9, 14)
    config = EngineConfig(**{"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, **changes})
    other = Engine(decoder, config)

    assert run(other, prompts) == run(engine, prompts)
    assert other.cache_stats().used == 0
    if "num_host_blocks" in changes:
        assert other.cache_stats().swapped_in == other.cache_stats().swapped_out > 0
    elif "num_blocks" in changes:
        assert other.cache_stats().preemptions > 0


def test_a_windowed_model_gives_back_blocks_that_it_cannot_see(seed) -> None:
    windowed = tiny_decoder(sliding_window=6)
    other = Engine(windowed, EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=32))
    prompts = prompts_of(seed, 20, 2, 9)

    requests = [other.add(prompt, GREEDY) for prompt in prompts]
    most = 0
    while other.num_unfinished:
        other.step()
        most = max(most, other.cache_stats().used)

    assert [request.output_token_ids for request in requests] == [dense_greedy(windowed, p, 12) for p in prompts]
    # Without the window the three would hold 8 + 4 + 6 blocks at their ends.
    assert most < 18


def test_sampled_tokens_do_not_depend_on_neighbours(engine, seed) -> None:
    prompts = prompts_of(seed, 6, 11, 3)
    params = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, max_tokens=8, seed=5, ignore_eos=True)

    together = run(engine, prompts, params)

    assert [run(engine, [prompt], params)[0] for prompt in prompts] == together


def test_a_fixed_shapes_engine_leaves_the_same_bits_in_the_cache_with_and_without_neighbours(seed, monkeypatch) -> None:
    prompts = prompts_of(seed, 6, 21, 11)
    config = EngineConfig(
        block_size=4, max_num_seqs=8, max_num_batched_tokens=64, fixed_shapes=True, enable_prefix_caching=False
    )
    other = Engine(tiny_decoder(implementation="xla"), config)
    runner, blocks = other._core.device.runner, {}
    dispatch = runner.dispatch

    def watched(step: ScheduledStep) -> Any:
        blocks.update((row.seq_id, row.block_ids) for row in step.committed.rows)
        return dispatch(step)

    monkeypatch.setattr(runner, "dispatch", watched)
    contents = []
    for batch in (prompts[:1], prompts, prompts[::-1]):
        requests = [other.add(prompt, GREEDY) for prompt in batch]
        mine = requests[batch.index(prompts[0])]
        while other.num_unfinished:
            other.step()
        # Its prompt, and the generated tokens but for the last.
        places = list(blocks[mine.request_id])
        rows = [layer[places].cpu().numpy() for layer in other._core.device.pool.as_torch()]
        contents.append([np.moveaxis(row, 2, 1).reshape(-1, *row.shape[3:])[:32] for row in rows])

    for alone, before, behind in zip(*contents, strict=True):
        np.testing.assert_array_equal(alone, before)
        np.testing.assert_array_equal(alone, behind)


def test_a_fixed_shapes_engine_compiles_one_prefill_and_one_decode_program(decoder, seed) -> None:
    config = EngineConfig(
        block_size=4, max_num_seqs=3, max_num_batched_tokens=32, num_scheduler_steps=1, fixed_shapes=True
    )
    other = Engine(decoder, config)
    before = len(other.programs)

    run(other, prompts_of(seed, 20, 2))
    run(other, prompts_of(seed, 5))

    assert other.programs[before:] == (
        "3 sequences, 64 tokens, queries up to 64, plain",
        f"3 sequences, 3 tokens, queries up to 1, {greedy_kind()}",
    )


def test_an_idle_engine_that_scrubs_holds_nothing_of_anybody(decoder, seed) -> None:
    config = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "enable_prefix_caching": False}
    plain, scrubbing = (Engine(decoder, EngineConfig(**config, scrub_on_free=scrub)) for scrub in (False, True))
    prompts = prompts_of(seed, 20, 2, 9, 14, 3)

    tokens = [run(other, prompts) for other in (plain, scrubbing)]
    pools = [other._core.device.pool for other in (plain, scrubbing)]
    left = [any(layer.count_nonzero().item() for layer in pool.as_torch()) for pool in pools]

    assert tokens[0] == tokens[1]
    assert left == [True, False]


def test_cancelling_the_last_request_scrubs_what_it_left(decoder, seed) -> None:
    config = EngineConfig(
        block_size=4, max_num_seqs=4, max_num_batched_tokens=32, enable_prefix_caching=False, scrub_on_free=True
    )
    other = Engine(decoder, config)
    (prompt,) = prompts_of(seed, 9)
    request = other.add(prompt, GREEDY)
    other.step()

    other.cancel(request.request_id)

    assert not any(layer.count_nonzero().item() for layer in other._core.device.pool.as_torch())


def test_a_repeated_prompt_is_found_in_the_prefix_cache(decoder, seed) -> None:
    engine = Engine(decoder, EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=32))
    (prompt,) = prompts_of(seed, 18)
    first = run(engine, [prompt])

    request = engine.add(prompt, GREEDY)
    while engine.num_unfinished:
        engine.step()

    assert request.num_cached_tokens == 16
    assert [request.output_token_ids] == first


def test_requests_of_different_salts_share_nothing(decoder, seed) -> None:
    engine = Engine(decoder, EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=32))
    (prompt,) = prompts_of(seed, 18)
    requests = []
    for salt in (b"a", b"b", b"a"):
        requests.append(engine.add(prompt, GREEDY, salt=salt))
        while engine.num_unfinished:
            engine.step()

    assert [request.num_cached_tokens for request in requests] == [0, 0, 16]


def test_nothing_is_compiled_after_every_bucket_was_seen(engine, seed) -> None:
    prompts = prompts_of(seed, 20, 2, 9, 14)
    run(engine, prompts)
    before = engine.programs

    run(engine, prompts_of(seed + 1, 20, 2, 9, 14))

    assert engine.programs == before


def test_only_steps_that_compile_count_as_compiling(decoder, seed) -> None:
    config = EngineConfig(block_size=2, max_num_seqs=1, max_num_batched_tokens=8, enable_prefix_caching=False)
    other = Engine(decoder, config)
    (prompt,) = prompts_of(seed, 5)
    run(other, [prompt])
    first = other.compile_seconds

    run(other, [prompt])

    assert first > 0
    assert other.compile_seconds == first


def test_an_end_of_sequence_token_ends_the_request(engine, seed) -> None:
    (prompt,) = prompts_of(seed, 5)
    (tokens,) = run(engine, [prompt])

    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(tokens[3],), ignore_eos=True)
    (stopped,) = run(engine, [prompt], params)

    assert stopped == tokens[: tokens.index(tokens[3]) + 1]


def test_cancelling_gives_the_blocks_back(engine, seed) -> None:
    kept, dropped = (engine.add(prompt, GREEDY) for prompt in prompts_of(seed, 6, 9))
    engine.step()
    engine.step()

    delta = engine.cancel(dropped.request_id)
    while engine.num_unfinished:
        engine.step()

    assert delta.finish_reason == "cancelled"
    assert len(kept.output_token_ids) == 12
    assert engine.cache_stats().used == 0


def test_the_load_is_the_most_tokens_of_all_unfinished_requests(engine, seed) -> None:
    loads = [engine.load]
    first, second = (engine.add(prompt, GREEDY) for prompt in prompts_of(seed, 6, 9))
    loads.append(engine.load)
    # An interrupted step leaves no state; the next one counts again.
    engine._core._state = None
    engine.step()
    loads.append(engine.load)
    engine.cancel(second.request_id)
    loads.append(engine.load)
    while engine.num_unfinished:
        engine.step()
    loads.append(engine.load)

    assert loads == [0, 6 + 12 + 9 + 12, 6 + 12 + 9 + 12, 6 + 12, 0]
    assert len(first.output_token_ids) == 12


@pytest.mark.parametrize(
    ("prompt", "arguments", "kind", "message"),
    [
        ([], {}, InvalidInput, "the prompt of 'r' is empty; it needs at least one token."),
        ([1, 97], {}, InvalidInput, "prompt token 1 of 'r' is 97, outside the vocabulary; ids are 0 to 96."),
        ([-1], {}, InvalidInput, "prompt token 0 of 'r' is -1, outside the vocabulary; ids are 0 to 96."),
        (
            [1.5],
            {},
            InvalidInput,
            "the prompt of 'r' has dtype float64 and shape (1,); it must be a flat sequence of ints.",
        ),
        (
            [[1], [2, 3]],
            {},
            InvalidInput,
            "the prompt of 'r' must be a flat sequence of ints; it is ragged.",
        ),
        (
            [1, 10**5000],
            {},
            InvalidInput,
            "the prompt of 'r' has dtype object and shape (2,); it must be a flat sequence of ints.",
        ),
        ([1], {"prompt": 5}, InvalidInput, "prompt is a int; it must be the prompt's text, or None."),
        (
            [1],
            {"priority": 1 << 21},
            InvalidInput,
            "priority is 2097152; it must be from -1048576 to 1048576.",
        ),
        ([1], {"outbox": []}, InvalidInput, "outbox is []; it must be an Outbox."),
        ([1], {"salt": b""}, InvalidInput, "salt must be bytes, 1 to 64 of them, or None."),
        ([1], {"salt": "text"}, InvalidInput, "salt must be bytes, 1 to 64 of them, or None."),
        ([1], {"request_id": ""}, InvalidInput, "request_id must be a string of 1 to 256 characters."),
        (
            [1] * 120,
            {},
            RequestTooLong,
            (
                "'r' needs 132 tokens (120 prompt + 12 new); this engine's max_model_len is 128. Shorten the prompt or "
                "lower max_tokens."
            ),
        ),
        (
            # The length is checked before the tokens are read.
            [object()] * 120,
            {},
            RequestTooLong,
            (
                "'r' needs 132 tokens (120 prompt + 12 new); this engine's max_model_len is 128. Shorten the prompt or "
                "lower max_tokens."
            ),
        ),
    ],
)
def test_a_bad_request_is_refused_at_the_door(engine, prompt, arguments, kind, message) -> None:
    before = engine.cache_stats()

    with pytest.raises(kind) as error:
        engine.add(prompt, GREEDY, **{"request_id": "r", **arguments})

    assert str(error.value) == message
    assert engine.num_unfinished == 0
    assert engine.cache_stats() == before


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers(decoder) -> None:
    engine = Engine(decoder, EngineConfig(block_size=4, num_blocks=6, max_num_batched_tokens=32))

    with pytest.raises(
        RequestTooLong, match=r"'big' needs 8 blocks \(20 prompt \+ 12 new tokens\); the pool can ever give 5"
    ):
        engine.add([1] * 20, GREEDY, request_id="big")


def test_two_unfinished_requests_cannot_share_an_id(engine) -> None:
    engine.add([1], GREEDY, request_id="twin")

    with pytest.raises(InvalidInput, match="request_id 'twin' belongs to an unfinished request; ids must be unique"):
        engine.add([2], GREEDY, request_id="twin")

    engine.cancel("twin")


def test_a_later_request_of_a_lower_priority_value_is_served_first(decoder, seed) -> None:
    other = Engine(decoder, EngineConfig(block_size=4, max_num_seqs=1, max_num_batched_tokens=32))
    prompts = prompts_of(seed, 5, 6, 7)
    last, first, second = (other.add(prompts[index], GREEDY, priority=value) for index, value in enumerate((3, -1, 0)))

    ended: list[str] = []
    while other.num_unfinished:
        ended += [delta.request_id for delta in other.step() if delta.finish_reason is not None]

    assert ended == [request.request_id for request in (first, second, last)]


def test_nobody_is_overtaken_by_more_than_64_later_ones_for_each_level(engine, seed) -> None:
    (prompt,) = prompts_of(seed, 3)

    low, *high = (engine.add(prompt, GREEDY, priority=int(number == 0)) for number in range(66))

    assert sum(request.order < low.order for request in high) == 63
    for request in (low, *high):
        engine.cancel(request.request_id)


def test_an_unknown_request_cannot_be_cancelled(engine) -> None:
    with pytest.raises(InvalidInput, match="no unfinished request has the id 'nobody'"):
        engine.cancel("nobody")
    with pytest.raises(InvalidInput, match="no unfinished request has the id an int of 16610 bits"):
        engine.cancel(10**5000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size is 0; it must be from 1 to 2147483647."),
        ({"num_blocks": 1}, "num_blocks is 1; it must be from 2 to 2147483647, or None."),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 4},
            (
                "max_num_batched_tokens is 4; it must be at least max_num_seqs (8), one token for each "
                "sequence of a decode step."
            ),
        ),
        (
            {"steps_in_flight": 3},
            (
                "steps_in_flight is 3; a step reads the tokens of the one before it on the device, so at most 2 "
                "can be in flight."
            ),
        ),
        (
            {"num_scheduler_steps": 9, "max_num_seqs": 8, "max_num_batched_tokens": 8},
            (
                "num_scheduler_steps is 9; it must not be above max_num_batched_tokens (8), the tokens that a "
                "sequence may get in one step."
            ),
        ),
        ({"seed": -1}, "seed is -1; it must be from 0 to 4294967295."),
        (
            {"max_num_seqs": 10**5000},
            "max_num_seqs is an int of 16610 bits; it must be from 1 to 65536.",
        ),
        ({"scrub_on_free": "no"}, "scrub_on_free is 'no'; it must be True or False."),
    ],
)
def test_bad_engine_sizes_are_named(arguments, message) -> None:
    with pytest.raises(InvalidInput) as error:
        EngineConfig(**arguments)

    assert str(error.value) == message


def test_a_memory_budget_too_small_for_one_sequence_is_refused(decoder) -> None:
    with pytest.raises(
        InvalidInput, match="the budget of 4,096 bytes holds 4 blocks; a sequence of 128 tokens needs 32"
    ):
        Engine(decoder, EngineConfig(block_size=4, kv_cache_bytes=4096))


@pytest.mark.parametrize(
    ("model_changes", "config", "message"),
    [
        ({}, {"block_size": 4}, "config is a dict; it must be an EngineConfig, or None."),
        (
            {"implementation": "fast"},
            None,
            "implementation is 'fast'; use one of 'triton', 'torch', 'xla', or None to let jattn choose.",
        ),
        (
            {},
            EngineConfig(logits_processors={"short": lambda logits, *_: logits[:5]}),
            r"logits_processors\['short'\] returns float32\[5\]; it must be float32\[97\]\.",
        ),
        (
            {},
            EngineConfig(num_host_blocks=10**9),
            r"num_host_blocks is 1000000000; they need 4,096,000,000,000 bytes and this machine has [\d,]+\.",
        ),
    ],
)
def test_an_engine_that_could_never_run_is_not_built(model_changes, config, message) -> None:
    with pytest.raises(InvalidInput) as error:
        Engine(tiny_decoder(**model_changes), config)

    assert str(error.value) == message or re.fullmatch(message, str(error.value))


def test_a_length_beyond_the_models_is_refused(decoder) -> None:
    with pytest.raises(InvalidInput, match="max_model_len is 4096; the model was made for 128 tokens at most"):
        Engine(decoder, EngineConfig(max_model_len=4096))


def test_the_statistics_of_an_engine_that_nobody_waits_for_count_no_step_in_flight(decoder, seed) -> None:
    engine = Engine(decoder, EngineConfig(block_size=4, max_num_seqs=2, steps_in_flight=2))
    request = engine.add(prompts_of(seed, 5)[0], GREEDY)
    engine.step()

    engine.cancel(request.request_id)

    stats = engine.cache_stats()
    assert (stats.used, stats.deferred, stats.num_sequences) == (0, 0, 0)
