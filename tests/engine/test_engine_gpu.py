"""The engine on CUDA: through the kernels and XLA's command buffers, what the CPU's tests promise holds too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.llm.engine import LLM, Engine, EngineConfig, SamplingParams
from jattn.llm.engine.device import programs
from jattn.llm.engine.device.buckets import Bucket
from jattn.llm.engine.device.sampler import Sampler
from jattn.llm.engine.options.params import SamplingKind
from jattn.llm.models import Decoder
from jattn.llm.models.mixers import DeltaNetConfig, KimiDeltaConfig, MambaConfig, ShortConvConfig
from tests.engine import test_routed_experts as routed
from tests.engine.conftest import tiny_decoder
from tests.engine.test_chaos import CONFIGS, chaos
from tests.engine.test_engine import GREEDY, prompts_of, run

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "implementation": "triton"}
STATES: dict[str, Any] = {
    "mamba": MambaConfig(num_heads=4, head_dim=16, state_size=16, num_groups=2),
    "delta_net": DeltaNetConfig(num_heads=4, num_kv_heads=2, key_dim=16, value_dim=16),
    "kimi_delta": KimiDeltaConfig(num_heads=4, head_dim=16),
    "short_conv": ShortConvConfig(),
}
FILTERS: dict[str, Any] = {
    "top_k": 5,
    "top_p": 0.7,
    "min_p": 0.1,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "logit_bias": {3: 2.0},
    "logprobs": 2,
}


def config_of(**changes: Any) -> EngineConfig:
    sizes: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return EngineConfig(**(sizes | changes))


@pytest.fixture(scope="module")
def kernels() -> Decoder:
    return tiny_decoder(**SIZES)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    # XLA's float32 products on a GPU are rounded to 10 bits otherwise, and a near tie may go either way.
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("config", CONFIGS)
def test_a_service_in_chaos_answers_as_a_lone_run_does(config, kernels, seed) -> None:
    engine = chaos(config, kernels, seed, num_requests=23)

    assert engine._core.device.pool.generation > 1


@pytest.mark.parametrize(
    "changes",
    [{}, {"steps_in_flight": 1}, {"max_num_batched_tokens": 16}, {"num_scheduler_steps": 4}, {"num_blocks": 70}],
    ids=str,
)
def test_paged_generation_equals_running_the_whole_sequence_again(changes, kernels, seed) -> None:
    prompts = prompts_of(seed, 90, 33, 90, 5, 61)
    prompts[2][:64] = prompts[0][:64]
    engine = Engine(kernels, config_of(**changes))

    said = run(engine, prompts)

    for prompt, tokens in zip(prompts, said, strict=True):
        logits = kernels.forward_dense(jnp.asarray([prompt + tokens]))[0]
        assert tokens == jnp.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist()


def test_replayed_experts_of_the_kernels_rollout_give_its_log_probabilities(seed) -> None:
    model = routed.decoder(**SIZES)
    assert model.config.moe is not None
    num_experts = model.config.moe.num_experts
    params = SamplingParams(max_tokens=20, logprobs=0, seed=3, ignore_eos=True)
    prompts = prompts_of(seed, 23, 40, 5)
    outputs = LLM(model, config=EngineConfig(**{**routed.SIZES, "batch_invariant": False})).generate(prompts, params)

    for output in outputs:
        experts: Any = output.outputs[0].routed_experts
        own = routed.replay_error(model, output, experts)
        # Products of the engine's thread may be rounded to 10 bits; other experts are far off.
        assert own < 0.05
        others = np.where(experts < 0, experts, (experts + 2) % num_experts)
        assert routed.replay_error(model, output, others) > 3 * own


def test_nothing_compiles_after_the_warm_up_for_any_mixture_of_parameters(kernels, seed) -> None:
    choose = random.Random(seed)
    engine = Engine(kernels, config_of())
    engine.warmup()
    compiled = engine.num_compilations

    for index in range(6):
        chosen = {name: FILTERS[name] for name in choose.sample(sorted(FILTERS), 3)}
        run(engine, prompts_of(seed + index, 30, 7, 12), SamplingParams(seed=index, max_tokens=6, **chosen))

    assert engine.num_compilations == compiled


def test_a_step_of_64_rows_multiplies_with_cublas() -> None:
    decoder = tiny_decoder(**SIZES | {"hidden_size": 256, "head_dim": 64, "dtype": "bfloat16"})
    engine = Engine(decoder, config_of(max_num_seqs=64))

    program: Any = engine._core.device.runner.programs(Bucket(64, 64, 1, Sampler(SamplingKind.PLAIN)))

    assert "__cublas" in program.as_text()
    assert "gemm_fusion" not in program.as_text()


@pytest.mark.parametrize("kind", ["mamba", "linear_attention", "kimi_delta_attention", "conv", "attention_mamba"])
def test_states_are_the_same_with_graphs_and_without(kind: str, seed, monkeypatch) -> None:
    others = kind if kind == "attention_mamba" else "attention"
    decoder = tiny_decoder(**SIZES | STATES, num_hidden_layers=3, layer_types=(kind, others, kind))
    prompts, params = prompts_of(seed, 30, 9, 1), SamplingParams(temperature=0.0, max_tokens=24, logprobs=1)
    found = []
    # Engines of other sizes share no programs. XLA forms graphs after the text that it shows, so the text has none.
    for num_blocks, options in ((64, {}), (65, {"xla_gpu_graph_min_graph_size": 1 << 20})):
        monkeypatch.setattr(programs, "PRODUCT_OPTIONS", {**programs.PRODUCT_OPTIONS, **options})
        engine = Engine(decoder, config_of(num_blocks=num_blocks))
        requests = [engine.add(prompt, params) for prompt in prompts]
        while engine.num_unfinished:
            engine.step()
        found.append(
            [
                (request.output_token_ids, [float(each.logprob) for each in request.logprobs[:24]])
                for request in requests
            ]
        )

    assert found[0] == found[1]


def test_who_draws_changes_nothing_for_who_does_not(kernels, seed) -> None:
    prompts = prompts_of(seed, 20, 9, 3)
    engine = Engine(kernels, config_of())
    alone = run(engine, prompts, GREEDY)
    greedy = [engine.add(prompt, GREEDY) for prompt in prompts]
    engine.add(prompts[0], SamplingParams(temperature=1.0, max_tokens=4))

    while engine.num_unfinished:
        engine.step()

    assert [list(request.output_token_ids) for request in greedy] == alone
    assert {name.rpartition(", ")[2] for name in engine.programs} >= {"greedy", "plain"}


def test_weights_given_to_a_running_engine_are_used_from_the_next_request_on(kernels, seed) -> None:
    other = tiny_decoder(**SIZES)
    nnx.update(other, jax.tree.map(lambda leaf: leaf * 1.25, nnx.state(other)))
    engine = Engine(kernels, config_of())
    prompts = prompts_of(seed, 20, 9)
    run(engine, prompts)
    compiled = engine.num_compilations

    engine.update_weights(other)

    assert run(engine, prompts) == run(Engine(other, config_of()), prompts, GREEDY)
    assert engine.num_compilations == compiled
