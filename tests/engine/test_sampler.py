"""Sampling on the device: each rule against its plain numpy form, distributions, and independence of batch mates."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn.llm.engine.device.sampler import (
    Rows,
    Sampler,
    check_processors,
    filtered,
    processed,
    sample,
    sample_fully,
    token_logprobs,
)
from jattn.llm.engine.device.tables import SamplerState, SlotTables
from jattn.llm.engine.options.params import SamplingKind, SamplingParams, pack_sampling, sampling_kind
from jattn.llm.engine.request.grammar import mask_of
from torch_core.base.errors import InvalidInput

VOCAB, LENGTH, ROWS, DRAWS = 40, 24, 4, 4000
NEUTRAL = SlotTables.neutral(max_model_len=LENGTH, vocab_size=VOCAB, num_processors=1)
NO_MASKS = np.full((ROWS, 2), -1, np.int32)


def scaled(logits: jax.Array, token_ids: jax.Array, num_prompt_tokens: jax.Array, num_tokens: jax.Array, value: Any):
    """A processor: adds its number to the logit of the last known token."""
    return logits.at[token_ids[num_tokens - 1]].add(value)


run_processed = jax.jit(functools.partial(processed, processors=(scaled,)))
run_filtered = jax.jit(filtered)
run_fully = jax.jit(sample_fully)
run_plain = jax.jit(sample)


def rows_of(*params: SamplingParams, seeds: list[int] | None = None, num_prompt_tokens: int = 1) -> Rows:
    packed = [
        pack_sampling(each, 3 if seeds is None else seeds[index], num_prompt_tokens)
        for index, each in enumerate(params)
    ]
    return Rows.unpack(jnp.asarray(np.stack(packed)))


def table_of(token_ids: list[int], **changes: Any) -> SlotTables:
    """A request's tables; tokens that nobody may read are of the vocabulary, so that a read would count them."""
    row = SlotTables(*(each.copy() for each in NEUTRAL))
    row.token_ids[:] = np.arange(LENGTH) % VOCAB
    row.token_ids[: len(token_ids)] = token_ids
    for name, value in changes.items():
        field = getattr(row, name)
        field[: len(value)] = value
    return row


def result_of(
    logits: np.ndarray,
    params: SamplingParams,
    tokens: list[int],
    num_prompt_tokens: int,
    masks: Any = NO_MASKS,
    **table,
) -> np.ndarray:
    """The processed logits of one row among others that want nothing."""
    tables = SlotTables(*(np.stack(each) for each in zip(table_of(tokens, **table), *[NEUTRAL] * 3, strict=True)))
    rows = rows_of(params, *[SamplingParams()] * 3, num_prompt_tokens=num_prompt_tokens)
    index = jnp.array([len(tokens) - num_prompt_tokens, 0, 0, 0], jnp.int32)
    num_tokens = jnp.array([len(tokens), 1, 1, 1], jnp.int32)
    batch = jnp.asarray(np.tile(logits, (ROWS, 1)), jnp.float32)
    out = np.asarray(run_processed(batch, rows, index, num_tokens, tables, masks))
    # The others' logits are as they came.
    assert np.array_equal(out[1:], np.asarray(batch)[1:])
    return out[0]


# The rules, as numpy has them.


def penalized(logits: np.ndarray, tokens: list[int], num_prompt: int, params: SamplingParams) -> np.ndarray:
    out = logits.astype(np.float32).copy()
    for token in set(tokens):
        out[token] = (
            out[token] / np.float32(params.repetition_penalty)
            if out[token] > 0
            else out[token] * np.float32(params.repetition_penalty)
        )
    for token in set(tokens[num_prompt:]):
        out[token] -= np.float32(params.frequency_penalty) * tokens[num_prompt:].count(token)
        out[token] -= np.float32(params.presence_penalty)
    return out


def kept_by_filters(tempered: np.ndarray, params: SamplingParams) -> set[int]:
    probabilities = np.exp(tempered.astype(np.float64))
    probabilities /= probabilities.sum()
    kept = {token for token in range(len(tempered)) if probabilities[token] >= params.min_p * probabilities.max()}
    if params.top_k > 0 and params.top_k < len(kept):
        threshold = sorted((tempered[token] for token in kept), reverse=True)[params.top_k - 1]
        kept = {token for token in kept if tempered[token] >= threshold}
    if params.top_p < 1:
        total = sum(probabilities[token] for token in kept)
        before = lambda token: sum(probabilities[t] for t in kept if tempered[t] > tempered[token])  # noqa: E731
        kept = {token for token in kept if before(token) < params.top_p * total}
    return kept


tokens_of = st.lists(st.integers(0, 7), min_size=2, max_size=12)


@settings(deadline=None, max_examples=60)
@given(
    tokens=tokens_of,
    num_prompt=st.integers(1, 12),
    penalties=st.tuples(st.floats(0.1, 3), st.floats(-2, 2), st.floats(-2, 2)),
    seed=st.integers(0, 99),
)
def test_penalties_are_those_of_the_rule(tokens, num_prompt, penalties, seed) -> None:
    num_prompt = min(num_prompt, len(tokens))
    params = SamplingParams(
        repetition_penalty=penalties[0], presence_penalty=penalties[1], frequency_penalty=penalties[2]
    )
    logits = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)

    assert np.allclose(
        result_of(logits, params, tokens, num_prompt),
        penalized(logits, tokens, num_prompt, params),
        rtol=1e-6,
        atol=1e-6,
    )


@settings(deadline=None, max_examples=100)
@given(
    st.floats(0.05, 5),
    st.integers(-1, VOCAB + 2),
    st.one_of(st.just(1.0), st.floats(1e-6, 1)),
    # Smaller shares are 0 on the device, which hides nothing.
    st.one_of(st.just(0.0), st.floats(1e-30, 1)),
    st.integers(0, 10**6),
)
def test_min_p_top_k_and_top_p_keep_what_the_rule_keeps(temperature, top_k, top_p, min_p, seed) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = np.random.default_rng(seed).standard_normal(VOCAB) * 3
    # Repeated values make ties, which stay or go together.
    tempered = np.round((logits - logits.max()) / temperature, 2).astype(np.float32) + 0

    out = np.asarray(run_filtered(jnp.asarray(np.tile(tempered, (ROWS, 1))), rows_of(*[params] * ROWS)))

    kept = {int(token) for token in np.flatnonzero(out[0] > -np.inf)}
    # A float32's eps may decide at the edge of a mass or of a share.
    nearby = [kept_by_filters(tempered, SamplingParams(**_nudged(params, by))) for by in (1 - 1e-5, 1, 1 + 1e-5)]
    assert set.intersection(*nearby) <= kept <= set.union(*nearby)
    assert np.array_equal(out[0][list(kept)], tempered[list(kept)])


def _nudged(params: SamplingParams, by: float) -> dict[str, Any]:
    top_p = params.top_p if params.top_p == 1 else min(params.top_p * by, 1)
    return {"top_k": params.top_k, "top_p": top_p, "min_p": min(params.min_p / by, 1)}


def test_only_allowed_tokens_are_left() -> None:
    out = result_of(np.zeros(VOCAB), SamplingParams(), [1, 2], 1, allowed=mask_of([3, 33], 2))

    assert list(np.flatnonzero(out > -np.inf)) == [3, 33]


def test_a_grammars_mask_and_allowed_tokens_both_hold() -> None:
    masks = NO_MASKS.copy()
    masks[0] = mask_of([4, 33], 2)

    out = result_of(np.zeros(VOCAB), SamplingParams(), [1, 2], 1, masks=masks, allowed=mask_of([3, 33], 2))

    assert list(np.flatnonzero(out > -np.inf)) == [33]


def test_a_bias_is_added_and_a_processor_sees_the_last_token() -> None:
    out = result_of(
        np.zeros(VOCAB), SamplingParams(), [1, 2, 9], 1, bias_tokens=[5, 7], bias=[2.0, -3.0], processor_values=[4.0]
    )

    assert {int(token): float(out[token]) for token in np.flatnonzero(out)} == {5: 2.0, 7: -3.0, 9: 4.0}


@pytest.mark.parametrize(("num_output", "banned"), [(0, True), (2, True), (3, False)])
def test_stop_tokens_are_banned_until_min_tokens(num_output, banned) -> None:
    tokens = [1] * (1 + num_output)

    out = result_of(np.zeros(VOCAB), SamplingParams(min_tokens=3), tokens, 1, min_tokens=[3], stop_tokens=[6, 8])

    assert list(np.flatnonzero(out == -np.inf)) == ([6, 8] if banned else [])


def by_the_host(logits: Any, *_: Any) -> Any:
    # Without a vmap_method, which many rows need.
    return jax.pure_callback(lambda x: x, logits, logits)


@pytest.mark.parametrize(
    ("processor", "error"), [(lambda *_: 1 // 0, "ZeroDivisionError"), (by_the_host, "NotImplementedError")]
)
def test_a_processor_that_fails_is_refused_before_anybody_calls_it(processor, error) -> None:
    with pytest.raises(InvalidInput, match=rf"^logits_processors\['x'\] raises {error} where it is traced: ") as caught:
        check_processors({"x": processor}, vocab_size=VOCAB, max_model_len=LENGTH)

    assert f"called with logits float32[{VOCAB}], token_ids int32[{LENGTH}], num_prompt" in str(caught.value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_of_logits_that_outgrow_a_float_one_is_taken(temperature) -> None:
    params = SamplingParams(temperature=temperature, repetition_penalty=1e-30)
    changes = {"bias_tokens": [7, 9], "bias": [3e38, 3e38]}
    tables = SlotTables(*map(np.stack, zip(*[table_of([7, 9], **changes)] * ROWS, strict=True)))
    tokens, _ = run_fully(
        np.zeros((ROWS, VOCAB), np.float32),
        rows_of(*[params] * ROWS, seeds=list(range(ROWS))),
        np.zeros(ROWS, np.int32),
        num_tokens=np.full(ROWS, 2, np.int32),
        slots=np.arange(ROWS),
        tables=tables,
        masks=NO_MASKS,
    )

    assert set(tokens.tolist()) <= {7, 9}


def test_a_row_with_nothing_left_keeps_its_masks_alone() -> None:
    out = result_of(
        np.zeros(VOCAB), SamplingParams(), [1, 2], 1, allowed=mask_of([3], 2), min_tokens=[9], stop_tokens=[3]
    )

    assert list(np.flatnonzero(out > -np.inf)) == [3]


def draws(logits: list[float], **params: Any) -> np.ndarray:
    """Shares of many draws, among which a neighbour makes the batch a full one."""
    rows = jnp.tile(jnp.array(logits, jnp.float32), (DRAWS, 1))
    neutral = SlotTables.neutral(max_model_len=4, vocab_size=len(logits), num_processors=0)
    tokens, _ = run_fully(
        rows,
        rows_of(*[SamplingParams(**params)] * DRAWS),
        jnp.arange(DRAWS, dtype=jnp.int32),
        num_tokens=jnp.ones(DRAWS, jnp.int32),
        slots=jnp.zeros(DRAWS, jnp.int32),
        tables=SlotTables(*(each[None] for each in neutral)),
        masks=jnp.full((DRAWS, 1), -1, jnp.int32),
    )
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / DRAWS


def test_draws_follow_the_softmax_of_the_tempered_logits() -> None:
    logits = [0.0, 1.0, 2.0]
    expected = np.exp(np.array(logits) / 2.0)
    expected /= expected.sum()

    frequencies = draws(logits, temperature=2.0)

    # Four standard deviations of a binomial share.
    assert np.all(np.abs(frequencies - expected) < 4 * np.sqrt(expected * (1 - expected) / DRAWS))


@pytest.mark.parametrize(
    ("logits", "params", "possible"),
    [
        ([3.0, 1.0, 2.0, 0.0], {"temperature": 5.0, "top_k": 2}, [0, 2]),
        ([0.0, 0.0, 0.0], {"top_k": 99}, [0, 1, 2]),
        # Probabilities 0.64, 0.24, 0.09, 0.03: the first two reach 0.7, the first alone does not.
        ([3.0, 2.0, 1.0, 0.0], {"top_p": 0.7}, [0, 1]),
        ([1.0, 5.0, 0.0], {"top_p": 1e-6}, [1]),
        # Zero as a float32.
        ([1.0, 5.0, 0.0], {"top_p": 1e-46}, [1]),
        ([1.0, 5.0, 4.0], {"temperature": 1e-46}, [1]),
        ([1.0, 5.0, 4.0], {"temperature": 1e-5}, [1]),
        ([1.0, 5.0, 4.0], {"temperature": 3.4e38}, [0, 1, 2]),
        ([1.0, 1.5, 0.0], {"temperature": 0.0}, [1]),
    ],
)
def test_draws_are_of_what_the_filters_keep(logits, params, possible) -> None:
    assert list(np.flatnonzero(draws(logits, **params))) == possible


@pytest.mark.parametrize("default", ["threefry2x32", "rbg"])
def test_a_rows_draw_does_not_depend_on_its_batch_mates_nor_on_the_kind_of_step(default) -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, VOCAB)), jnp.float32)
    params = [SamplingParams(temperature=t) for t in (1.0, 0.5, 2.0, 0.0)]
    rows, index = rows_of(*params, seeds=[1, 2, 3, 4]), jnp.array([0, 7, 2, 9], jnp.int32)

    with jax.default_prng_impl(default):
        together = run_plain(logits, rows, index).tolist()
        alone = [
            int(run_plain(logits[i : i + 1], Rows(*(c[i : i + 1] for c in rows)), index[i : i + 1])[0])
            for i in range(ROWS)
        ]
        tables = SlotTables(*(each[None] for each in NEUTRAL))
        full, _ = run_fully(
            logits, rows, index, num_tokens=index + 1, slots=jnp.zeros(ROWS, jnp.int32), tables=tables, masks=NO_MASKS
        )

        logprobs = token_logprobs(logits, full, 3)

    assert together == alone == full.tolist()
    reference = np.asarray(logits, np.float64)
    reference -= np.log(np.exp(reference).sum(axis=-1, keepdims=True))
    order = np.argsort(-reference, axis=-1)
    assert np.array_equal(logprobs.top_ids, order[:, :3])
    assert np.allclose(logprobs.logprob, reference[np.arange(ROWS), together], atol=1e-5)
    assert [int(order[row, rank - 1]) for row, rank in enumerate(logprobs.rank)] == together


def test_a_greedy_batch_says_what_a_plain_one_does_and_draws_nothing(seed) -> None:
    logits = jnp.asarray(np.random.default_rng(seed).normal(size=(5, 40)).round(1), jnp.float32)
    rows = Rows.unpack(jnp.asarray(np.stack([pack_sampling(SamplingParams(temperature=0.0), 1, 1)] * 5)))
    index = jnp.zeros(5, jnp.int32)
    greedy = Sampler(SamplingKind.GREEDY)
    state = SamplerState(None, None)
    choose = functools.partial(greedy, state=state, sample_index=index, num_tokens=index, slots=index)

    tokens, logprobs, after = choose(logits, rows)

    assert tokens.tolist() == run_plain(logits, rows, index).tolist()
    assert (logprobs, after) == (None, state)
    assert "threefry" not in jax.jit(lambda logits: choose(logits, rows)[0]).lower(logits).as_text()


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, SamplingKind.GREEDY),
        ({"temperature": 1.0, "top_k": -1}, SamplingKind.PLAIN),
        ({"top_k": 5}, SamplingKind.FULL),
        ({"top_p": 0.9}, SamplingKind.FULL),
        ({"temperature": 0.0, "logprobs": 0}, SamplingKind.SCORED),
        ({"temperature": 0.0, "logprobs": 1}, SamplingKind.FULL),
        ({"prompt_logprobs": 0}, SamplingKind.FULL),
        ({"temperature": 0.0, "presence_penalty": 0.1}, SamplingKind.FULL),
    ],
)
def test_a_batch_runs_no_more_sampler_than_it_needs(params, kind) -> None:
    assert sampling_kind(SamplingParams(**params)) is kind


def scored(mode: str, kind: SamplingKind, params: list[SamplingParams], logits: jax.Array) -> Any:
    """Tokens and values of rows whose last token is 0, by one sampler."""
    rows, index = rows_of(*params, seeds=list(range(len(params)))), jnp.zeros(len(params), jnp.int32)
    tables = SlotTables(*(jnp.asarray(each[None]) for each in NEUTRAL))
    sampler = Sampler(kind, 3 if kind is SamplingKind.FULL else 0, logprobs_mode=mode, records_masks=True)
    state = SamplerState(tables, jnp.asarray(NO_MASKS)) if kind is SamplingKind.FULL else SamplerState(None, None)
    tokens, found, _ = sampler(logits, rows, state, sample_index=index, num_tokens=index + 1, slots=index)
    return np.asarray(tokens), found


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_each_mode_reports_its_values_at_each_rows_temperature(mode: str, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(ROWS, VOCAB)).astype(np.float32)
    temperatures = [0.0, 0.9, 1.0, 2.5]
    params = [SamplingParams(temperature=each, logprobs=0) for each in temperatures]
    tokens, found = scored(mode, SamplingKind.SCORED, params, jnp.asarray(logits))
    expected = logits.astype(np.float64)
    if mode.startswith("processed"):
        expected = expected / np.where(np.array(temperatures) > 0, temperatures, 1)[:, None]
    if mode.endswith("logprobs"):
        expected = log_softmax(expected)
    np.testing.assert_allclose(found.logprob, expected[np.arange(ROWS), tokens], atol=1e-5)


def test_processed_values_are_those_of_the_tokens_that_filters_keep_and_masks_record_them(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(ROWS, VOCAB)).astype(np.float32)
    params = [SamplingParams(temperature=0.5, top_k=5, logprobs=3)] * ROWS
    tokens, found = scored("processed_logprobs", SamplingKind.FULL, params, jnp.asarray(logits))
    kept = logits >= np.sort(logits, axis=-1)[:, -5:-4]
    expected = log_softmax(np.where(kept, logits.astype(np.float64) / 0.5, -np.inf))
    np.testing.assert_allclose(found.logprob, expected[np.arange(ROWS), tokens], atol=1e-5)
    bits = np.unpackbits(np.asarray(found.kept).view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
    assert np.array_equal(bits.astype(bool), kept)


def test_a_scored_batch_draws_the_tokens_of_a_plain_one(seed: int) -> None:
    logits = jnp.asarray(np.random.default_rng(seed).normal(size=(ROWS, VOCAB)), jnp.float32)
    params = [SamplingParams(temperature=each, logprobs=0) for each in (0.0, 0.5, 1.0, 2.0)]
    tokens, found = scored("raw_logprobs", SamplingKind.SCORED, params, logits)
    expected = run_plain(logits, rows_of(*params, seeds=list(range(ROWS))), jnp.zeros(ROWS, jnp.int32))
    assert (tokens.tolist(), found.top_ids) == (expected.tolist(), None)


def test_rows_without_tables_have_the_slot_behind_all_others() -> None:
    tables = SlotTables(*(np.stack([each] * (ROWS + 1)) for each in NEUTRAL))
    assert SamplerState(tables, None).neutral_slot == ROWS
