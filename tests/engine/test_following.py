"""Engines whose model is trained in place, and partial, nested and converted states."""

from __future__ import annotations

import gc
import itertools
import logging
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jattn.llm.engine import LLM, Engine, Outbox, SamplingParams
from jattn.llm.engine.clients.follower import Follower
from jattn.llm.engine.device.weights import Weights
from jattn.llm.models import Decoder
from jattn.llm.models.changes import ModuleWatch
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import prompts_of, run
from tests.engine.test_weights import CONFIG, other_decoder
from torch_core.base.errors import InvalidInput

SCORED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)


class Leaf(nnx.Module):
    """A variable, and an array that is none."""

    def __init__(self, number: float) -> None:
        self.kernel, self.plain = nnx.Param(jnp.full((2, 2), number)), nnx.data(jnp.full(2, number))


class Tree(nnx.Module):
    def __init__(self) -> None:
        self.listed, self.top = nnx.List([Leaf(0.0), Leaf(1.0)]), Leaf(2.0)


class Updated:
    """The part of an engine that a follower knows: its weights."""

    spans_processes = False

    def __init__(self, model: nnx.Module) -> None:
        self.weights, self.num_updates = Weights(model), 0
        self.paths: list[Any] = []

    def update_weights(self, state: Any, **options: Any) -> None:
        self.paths = list(getattr(state, "paths", ()))
        self.weights.leaves = self.weights.brought(self.weights.checked(state, **options))
        self.num_updates += 1


class Wrapper(nnx.Module):
    """A trainer's model as an attribute of the served one."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.paged_spec = model.paged_spec

    def __call__(self, *args: Any) -> Any:
        return self.model(*args)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.model.logits(hidden)


@pytest.fixture(scope="module")
def theirs() -> Engine:
    """An engine of the weights that tests replace others by."""
    return Engine(other_decoder(), CONFIG)


def wrapped(model: Decoder) -> Any:
    return Wrapper(model)


def replace_arrays(model: nnx.Module, source: nnx.Module) -> None:
    nnx.update(model, jax.tree.map(jnp.array, nnx.state(source)))


def test_after_each_optimizer_step_the_engine_has_the_models_probabilities(seed: int) -> None:
    model = tiny_decoder()
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    tokens = jnp.asarray(prompts_of(seed, 12)[0])

    @nnx.jit
    def train(model: Decoder, optimizer: nnx.Optimizer) -> None:
        def loss(model: Decoder) -> jax.Array:
            logits = model.forward_dense(tokens[None])[0]
            return -jax.nn.log_softmax(logits)[:-1][jnp.arange(len(tokens) - 1), tokens[1:]].mean()

        optimizer.update(model, nnx.grad(loss)(model))

    @nnx.jit
    def scored(model: Decoder, whole: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(model.forward_dense(whole[None])[0])

    engine = Engine(model, CONFIG)
    compiled = None
    for step in range(20):
        train(model, optimizer)
        request = engine.add(tokens.tolist(), SCORED)
        while engine.num_unfinished:
            engine.step()
        whole = jnp.asarray([*tokens.tolist(), *request.output_token_ids])
        expected = scored(model, whole)[len(tokens) - 1 : -1][jnp.arange(6), whole[len(tokens) :]]
        found = [float(each.logprob) for each in request.logprobs]
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert request.weights_versions == (step + 1,)
        compiled = engine.num_compilations if compiled is None else compiled
    assert engine.num_compilations == compiled


def test_unchanged_models_keep_their_cached_prefixes(seed: int) -> None:
    engine = Engine(tiny_decoder(), CONFIG)
    (prompt,) = prompts_of(seed, 20)
    run(engine, [prompt])
    request = engine.add(prompt, SCORED)
    engine.step()
    assert (request.num_cached_tokens, engine.weights_version) == (16, 0)


def test_a_running_request_goes_on_with_the_new_arrays(seed: int) -> None:
    model, other = tiny_decoder(), other_decoder()
    engine = Engine(model, CONFIG)
    request = engine.add(prompts_of(seed, 6)[0], SCORED)
    while not request.output_token_ids:
        engine.step()
    replace_arrays(model, other)
    while engine.num_unfinished:
        engine.step()
    assert request.weights_versions == (0, 1)


def test_donated_weights_are_refused_by_name_until_the_model_has_others(seed: int) -> None:
    model, prompt = tiny_decoder(), prompts_of(seed, 6)[0]
    llm = LLM(model, config=CONFIG)
    expected = llm.generate([prompt], SCORED)[0].outputs[0].token_ids
    request = llm.engine.add(prompt, SCORED)
    llm.engine.step()
    moved = jax.jit(lambda state: jax.tree.map(lambda x: 1 * x, state), donate_argnums=0)(nnx.state(model))

    for call in (llm.engine.step, lambda: llm.generate([prompt], SCORED), llm.engine.step):
        with pytest.raises(InvalidInput, match="was donated or deleted"):
            call()
    nnx.update(model, moved)
    while llm.engine.num_unfinished:
        llm.engine.step()
    assert tuple(request.output_token_ids) == llm.generate([prompt], SCORED)[0].outputs[0].token_ids == expected


def test_the_model_within_a_dropped_wrapper_is_followed(theirs: Engine, seed: int) -> None:
    model, other, prompts = tiny_decoder(), other_decoder(), prompts_of(seed, 9)
    engine = Engine(wrapped(model), CONFIG)
    gc.collect()
    replace_arrays(model, other)
    assert run(engine, prompts) == run(theirs, prompts)


def test_a_replaced_layer_is_found_by_the_next_call_of_an_llm(seed: int) -> None:
    model, other, prompts = tiny_decoder(), other_decoder(), prompts_of(seed, 9)
    llm = LLM(model, config=CONFIG)
    model.layers[0].mlp = other.layers[0].mlp
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = list(llm.generate(prompts, params)[0].outputs[0].token_ids)
    assert [found] == run(Engine(model, CONFIG), prompts)


def test_an_array_of_another_shape_is_refused_by_name_at_every_call(seed: int) -> None:
    model = tiny_decoder()
    engine, prompts = Engine(model, CONFIG), prompts_of(seed, 5)
    norm: Any = model.layers[0].input_layernorm
    old = norm.weight.get_value()
    norm.weight.set_value(jnp.ones(3))
    engine.add(prompts[0], SCORED)
    for call in (engine.step, lambda: engine.wait(Outbox())):
        with pytest.raises(InvalidInput, match=r"layers\.0\.input_layernorm\.weight"):
            call()
    norm.weight.set_value(old)
    engine.step()
    assert engine.weights_version == 0


def test_without_following_the_first_difference_is_logged_once(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    model, other, prompts = tiny_decoder(), other_decoder(), prompts_of(seed, 9)
    engine = Engine(model, CONFIG, follow=False)
    old = run(engine, prompts)
    replace_arrays(model, other)
    with caplog.at_level(logging.WARNING, logger="jattn"):
        assert run(engine, prompts) == old
        run(engine, prompts)
    assert len([record for record in caplog.records if "replaced in place" in record.message]) == 1


def test_an_explicit_update_is_kept_while_the_model_does_not_change(theirs: Engine, seed: int) -> None:
    model, other, prompts = tiny_decoder(), other_decoder(), prompts_of(seed, 9)
    llm = LLM(model, config=CONFIG)
    llm.update_weights(other, version=40)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    output = llm.generate(prompts, params)[0].outputs[0]
    assert [list(output.token_ids)] == run(theirs, prompts)
    assert output.weights_versions == (40,)


def test_the_watch_keeps_no_array_alive() -> None:
    model = tiny_decoder()
    watch = ModuleWatch(model)
    arrays = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(nnx.state(model))}
    del model
    gc.collect()
    assert not arrays & {each.unsafe_buffer_pointer() for each in jax.live_arrays() if each.is_fully_addressable}
    assert not watch.is_changed()
    assert not watch.changes()


def test_a_part_of_a_nested_model_in_another_dtype_is_taken(seed: int) -> None:
    model, other, prompts = tiny_decoder(), other_decoder(), prompts_of(seed, 9)
    engine = Engine(wrapped(model), CONFIG)
    new = [layer.mlp.down_proj.kernel.get_value().astype(jnp.bfloat16) for layer in other.layers]
    given = {0: np.asarray(new[0]), 1: new[1]}
    part = {"layers": {index: {"mlp": {"down_proj": {"kernel": kernel}}} for index, kernel in given.items()}}
    engine.update_weights(part, partial=True, prefix="model", cast=True)
    expected = tiny_decoder()
    for layer, kernel in zip(expected.layers, new, strict=True):
        layer.mlp.down_proj.kernel.set_value(kernel.astype(jnp.float32))
    assert run(engine, prompts) == run(Engine(expected, CONFIG), prompts)


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        ({"layers": {0: {"lora": jnp.ones(2)}}}, {"partial": True}, r"layers\.0\.lora"),
        ({"norm": {"weight": jnp.ones(32)}}, {"partial": True, "prefix": "policy"}, "prefix"),
        ({}, {"partial": True}, "empty"),
        ({"norm": {"weight": jnp.ones(32, jnp.int32)}}, {"partial": True, "cast": True}, "int32"),
        ({"norm": {"weight": jnp.ones(32, jnp.bfloat16)}}, {"partial": True}, "bfloat16"),
        ({"norm": {"weight": jnp.ones(32)}}, {"partial": True, "version": "7"}, "^version is '7'"),
        ({"norm": {"weight": jnp.ones(32)}}, {"partial": 1}, "^partial is 1"),
        ({"norm": {"weight": jnp.ones(32)}}, {"partial": True, "prefix": 3}, "^prefix is 3"),
    ],
    ids=["leaf", "prefix", "nothing", "integers", "no cast", "version", "partial", "kind of prefix"],
)
def test_a_partial_state_that_does_not_fit_is_refused(
    theirs: Engine, state: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        theirs.update_weights(state, **options)
    assert theirs.weights_version == 0


def test_whatever_is_replaced_in_a_model_is_in_the_engine_after_a_check(seed: int) -> None:
    choose, numbers = random.Random(seed), itertools.count(10.0)
    model = Tree()
    engine, follower = Updated(model), Follower(model, True)

    def fresh(x: jax.Array) -> jax.Array:
        return jnp.full(x.shape, next(numbers))

    def leaf() -> Leaf:
        return choose.choice([*model.listed, model.top])

    changes: list[Any] = [
        lambda: leaf().kernel.set_value(fresh(jnp.ones((2, 2)))),
        lambda: setattr(leaf(), "kernel", nnx.Param(fresh(jnp.ones((2, 2))))),
        lambda: setattr(leaf(), "plain", nnx.data(fresh(jnp.ones(2)))),
        lambda: nnx.update(model, jax.tree.map(fresh, nnx.state(model))),
        lambda: setattr(model, "top", Leaf(next(numbers))),
        lambda: model.listed.__setitem__(choose.randrange(2), Leaf(next(numbers))),
        lambda: setattr(model, "listed", nnx.List(list(model.listed)[::-1])),
    ]
    for _ in range(40):
        made = choose.sample(range(len(changes)), choose.randrange(3))
        for index in made:
            changes[index]()
        # Arrays alone are found by every step, modules by the next call of an LLM.
        follower.check(engine, modules=any(index > 3 for index in made))

        jax.tree.map(np.testing.assert_array_equal, engine.weights.leaves, jax.tree.leaves(nnx.state(model)))
        before = engine.num_updates
        follower.check(engine, modules=True)
        assert engine.num_updates == before


def test_replaced_arrays_alone_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tree()
    engine, follower = Updated(model), Follower(model, True)
    model.listed[1].kernel.set_value(jnp.ones((2, 2)))
    monkeypatch.setattr(nnx, "state", None)

    follower.check(engine, modules=True)

    assert engine.paths == [("listed", 1, "kernel")]


def test_a_variable_that_the_engine_has_not_is_refused_at_the_next_change() -> None:
    model = Tree()
    engine, follower = Updated(model), Follower(model, True)
    model.top.kernel.set_value(jnp.ones((2, 2)))
    setattr(model.top, "added", nnx.Param(jnp.ones(2)))  # noqa: B010

    for _ in range(2):
        with pytest.raises(InvalidInput, match=r"top\.added"):
            follower.check(engine)


def test_any_part_of_a_state_replaces_that_part(seed: int) -> None:
    choose, numbers = random.Random(seed), itertools.count(10.0)
    engine = Updated(nnx.Dict({"model": Tree()}))
    flat: Any = nnx.to_flat_state(nnx.state(nnx.Dict({"model": Tree()})))
    names = [".".join(map(str, path)) for path, _ in flat]
    for _ in range(30):
        part, expected = {}, list(map(np.asarray, engine.weights.leaves))
        for index in choose.sample(range(len(names)), choose.randrange(1, 4)):
            _, *path = names[index].split(".")
            expected[index] = np.full(expected[index].shape, next(numbers))
            array = choose.choice([jnp.asarray, np.float32, lambda x: jnp.asarray(x, jnp.bfloat16)])(expected[index])
            part[tuple(int(key) if key.isdigit() else key for key in path)] = array
        engine.update_weights(nnx.from_flat_state(part), partial=True, prefix="model", cast=True)

        jax.tree.map(np.testing.assert_array_equal, engine.weights.leaves, expected)
