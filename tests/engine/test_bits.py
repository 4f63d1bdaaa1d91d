"""A batch-invariant engine: the log-probabilities of generation are those of the training pass, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import LLM, EngineConfig, SamplingParams, Unsupported, token_logprobs
from jattn.llm.engine import RequestOutput, Verification
from jattn.llm.engine.clients.verify import verify
from jattn.llm.models import LatentConfig, MoEConfig, layers, quantize_fp8, set_batch_invariant
from jattn.llm.testing import compare_bits
from jattn.ops import row_product
from tests.support.tiny_models import tiny_config, tiny_model

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "experts": {"moe": MoEConfig(num_experts=6, num_experts_per_tok=2, intermediate_size=24)},
    "windows": {
        "layer_windows": (24, None),
        "qk_norm": "head",
        "norm_type": "gemma_rms_norm",
        "norm_placement": "both",
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
        "tie_word_embeddings": True,
    },
    "latents": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "latent": LatentConfig(kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, q_lora_rank=20),
    },
}
SIZES: dict[str, Any] = {"block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 128}
#: Few blocks, so that requests are preempted and computed again, or come back from the host.
ENGINES: dict[str, dict[str, Any]] = {
    "preempted": {"num_blocks": 34, "num_scheduler_steps": 3},
    "swapped": {"num_blocks": 34, "num_host_blocks": 20, "max_num_batched_tokens": 33},
    "speculating": {"num_blocks": 60, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "fixed": {"num_blocks": 60, "fixed_shapes": True, "logprobs_mode": "processed_logprobs"},
}


def run(model: Any, count: int, seed: int, **changes: Any) -> tuple[list[RequestOutput], Verification]:
    """Generates for random prompts, many of which share a prefix, and verifies the log-probabilities."""
    random = np.random.default_rng(seed)
    shared = random.integers(1, 257, 40).tolist()
    prompts = [
        shared[: random.integers(40)] + random.integers(1, 257, random.integers(1, 50)).tolist() for _ in range(count)
    ]
    params = []
    for _ in prompts:
        temperature = float(random.choice([0.0, 0.7, 1.0]))
        params.append(
            SamplingParams(
                max_tokens=int(random.integers(1, 30)),
                temperature=temperature,
                n=int(random.choice([1, 2])) if temperature else 1,
                seed=int(random.integers(1 << 30)),
                logprobs=0,
                ignore_eos=True,
            )
        )
    options: dict[str, Any] = SIZES | {"batch_invariant": True} | changes
    with LLM(model, config=EngineConfig(**options)) as llm:
        outputs = llm.generate(prompts, params)
        return outputs, llm.verify(outputs, params)


class Own(nnx.Module):
    """A module that has the training pass of a decoder, and nothing else of it."""

    batch_invariant = True

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder

    def forward_dense(self, tokens: jax.Array) -> jax.Array:
        return self.decoder.forward_dense(tokens)


def test_an_update_of_the_weights_is_verified_with_the_new_ones(seed):
    model, other = (tiny_model(tiny_config(num_hidden_layers=1), each, None) for each in (seed, seed + 1))
    params = SamplingParams(max_tokens=4, logprobs=0)
    with LLM(model, config=EngineConfig(**SIZES, **ENGINES["preempted"], batch_invariant=True)) as llm:
        llm.update_weights(nnx.state(other))
        outputs = llm.generate([[5, 6, 7]], params)
        assert llm.verify(outputs, params).num_differing == 0
        own = Own(llm.engine.current_model)
    assert verify(own, outputs, logprobs_mode="raw_logprobs", temperatures=[1.0]).num_differing == 0


def test_bits_survive_preemption_shared_prefixes_chunks_and_several_steps(seed):
    model = tiny_model(tiny_config(num_hidden_layers=1), seed, None)
    outputs, found = run(model, 8, seed, **ENGINES["preempted"])
    assert found.num_values > 40
    assert (found.num_differing, found.first_difference) == (0, None)

    # A value that differs is counted and found.
    completion = outputs[3].outputs[0]
    first, *others = list(completion.logprobs or [])
    wrong = {token: replace(value, logprob=value.logprob + 1) for token, value in first.items()}
    outputs[3] = replace(outputs[3], outputs=(replace(completion, logprobs=(wrong, *others)),))
    changed = verify(model, outputs[3:4], logprobs_mode="raw_logprobs", temperatures=[1.0])
    assert (changed.num_differing, changed.first_difference) == (1, (0, 0, 0))
    assert changed.digest != verify(model, outputs[4:5], logprobs_mode="raw_logprobs", temperatures=[1.0]).digest


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_of_2000_requests_differs(kind, engine, dtype, seed):
    _, found = run(tiny_model(tiny_config(dtype=dtype, **KINDS[kind]), seed, None), 63, seed, **ENGINES[engine])
    assert found.num_differing == 0, str(found)


def test_the_training_pass_has_the_same_bits_with_gradients_and_rematerialised(seed):
    model = tiny_model(tiny_config(num_hidden_layers=1), seed, None)
    set_batch_invariant(model)
    graph, state = nnx.split(model)
    tokens = jnp.asarray(np.random.default_rng(seed).integers(1, 257, (2, 20)), jnp.int32)

    def scores(state, tokens):
        logits = nnx.merge(graph, state).forward_dense(tokens)
        return token_logprobs(logits[:, :-1], tokens[:, 1:], batch_invariant=True)

    def loss(state, tokens):
        found = jax.checkpoint(scores)(state, tokens)
        return found.sum(), found

    expected = jax.jit(scores)(state, tokens[:1])
    (_, found), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(state, tokens)
    np.testing.assert_array_equal(found[:1], expected)
    assert all(np.isfinite(each).all() for each in jax.tree.leaves(gradients))


@pytest.mark.nightly
def test_the_first_layer_and_operation_that_differ_are_named(seed, monkeypatch):
    def by_number_of_rows(x: jax.Array, kernel: jax.Array, **options: Any) -> jax.Array:
        wrong = 1e-3 * len(x) if kernel.shape[0] == 80 else 0
        return row_product(x, kernel, **options) + wrong

    monkeypatch.setattr(layers, "row_product", by_number_of_rows)
    report = compare_bits(tiny_model(tiny_config(num_hidden_layers=1), seed, None), [[5, 6, 7, 8]], max_tokens=2)
    assert not report.passed
    assert report.first_difference == "prefill: layer 0, mlp"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"enable_lora": True}, "enable_lora"),
    ],
)
def test_options_that_break_the_promise_are_refused(changes, message, seed):
    with pytest.raises(Unsupported, match=message):
        LLM(tiny_model(tiny_config(), seed), config=EngineConfig(**SIZES, batch_invariant=True, **changes))


def test_a_module_that_breaks_the_promise_is_named_and_nothing_is_switched(seed):
    model = tiny_model(tiny_config(), seed)
    quantize_fp8(model)
    with pytest.raises(Unsupported, match=r"layers\.0\..*_proj is a Fp8Linear"):
        set_batch_invariant(model)
    assert not model.batch_invariant


class Doubled(nnx.Linear):
    def __call__(self, x, out_sharding=None):
        return x @ (2 * self.kernel.get_value())


def own_product(*operands, **options):
    return jax.lax.dot_general(*operands, **options)


MODULES = {
    "Einsum": lambda rngs: nnx.Einsum("td,dh->th", (4, 4), rngs=rngs),
    "Conv": lambda rngs: nnx.Conv(4, 4, (3,), rngs=rngs),
    "ConvTranspose": lambda rngs: nnx.ConvTranspose(4, 4, (3,), rngs=rngs),
    "LoRA": lambda rngs: nnx.LoRA(4, 2, 4, rngs=rngs),
    "LoRA of a LoRALinear": lambda rngs: nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs),
    "MultiHeadAttention": lambda rngs: nnx.MultiHeadAttention(2, 4, rngs=rngs),
    "LayerNorm": lambda rngs: nnx.LayerNorm(4, rngs=rngs),
    "BatchNorm": lambda rngs: nnx.BatchNorm(4, rngs=rngs),
    "SpectralNorm": lambda rngs: nnx.SpectralNorm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs),
    "SimpleCell": lambda rngs: nnx.SimpleCell(4, 4, rngs=rngs),
    "Doubled": lambda rngs: Doubled(4, 4, rngs=rngs),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODULES)
def test_modules_of_flax_with_other_products_are_refused_by_path(kind):
    model = nnx.eval_shape(lambda: nnx.Dict({"head": MODULES[kind](nnx.Rngs(0))}))
    refused = rf"head.* is a {kind.split()[0]}, whose results may depend on the batch; .*row"
    with pytest.raises(Unsupported, match=refused):
        set_batch_invariant(model)


@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: nnx.Linear(4, 4, dot_general=own_product, rngs=rngs),
        lambda rngs: nnx.LinearGeneral(4, 4, dot_general_cls=lambda: own_product, rngs=rngs),
    ],
    ids=["Linear", "LinearGeneral"],
)
def test_a_product_of_the_modules_own_is_refused_not_replaced(make):
    model = nnx.eval_shape(lambda: nnx.Dict({"head": make(nnx.Rngs(0))}))
    with pytest.raises(Unsupported, match="head has a dot_general of its own"):
        set_batch_invariant(model)


def test_the_product_of_an_embedding_is_refused_when_it_is_called():
    model = nnx.eval_shape(lambda: nnx.Dict({"embed": nnx.Embed(8, 4, rngs=nnx.Rngs(0))}))
    for _ in range(2):
        set_batch_invariant(model)

    with pytest.raises(Unsupported, match=r"embed is an Embed, .*row_product"):
        model["embed"].attend(jnp.ones(4))
    assert nnx.graphdef(model) == nnx.graphdef(nnx.clone(model))
