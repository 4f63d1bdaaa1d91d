"""8-bit caches behind the engine: scales are measured, stored and honoured, and tokens stay what they were, mostly."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.llm.engine import (
    LLM,
    Engine,
    EngineConfig,
    KVCacheScales,
    Logprob,
    RequestOutput,
    SamplingParams,
    calibrate_kv_cache,
)
from jattn.llm.load import embedded_model_folder, load_model, save_model
from jattn.llm.models import Decoder, LatentConfig
from jattn.metadata import AttentionMetadata
from jattn.nn import MultiHeadLatentAttention, PagedAttention
from jattn.nn.paged import KVScales
from jattn.nn.scan import paged_layers
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import GREEDY, prompts_of, run
from tests.support.tiny_models import write_tiny_model
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.metadata import SequenceRow

SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "fixed_shapes": True}


A_PATH: Any = "scales.json"


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_decoder(num_hidden_layers=1)


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return Engine(model, EngineConfig(**SIZES, kv_cache_dtype="fp8"))


@nnx.jit
def step(model, *given):
    return model(*given)


def keys_and_values(model: Decoder, tokens: list[int]) -> np.ndarray:
    """[2, tokens, heads, size], what the first layer writes, by a plain cache."""
    metadata = AttentionMetadata.build([SequenceRow([1], 0, len(tokens))], block_size=64, num_blocks=2)
    caches = tuple(jnp.zeros(model.paged_spec.cache_spec(64).shape(2)) for _ in range(model.paged_spec.num_layers))
    _, caches = step(model, jnp.asarray(tokens), jnp.arange(len(tokens)), caches, metadata)
    return np.asarray(caches[0][1])[:, : len(tokens)]


def test_calibration_finds_the_largest_key_and_value_of_all_prompts(model, seed) -> None:
    prompts = prompts_of(seed, 5, 40, 17)

    scales = calibrate_kv_cache(model, prompts)

    k_max, v_max = np.max([np.abs(keys_and_values(model, each)).max((1, 2, 3)) for each in prompts], axis=0)
    ((path, (k_found, v_found)),) = scales.ranges.items()
    assert path == "layers.0.self_attn.paged_attention"
    np.testing.assert_allclose((k_found, v_found), (k_max, v_max), rtol=1e-5)
    # The model is what it was.
    assert all(layer.kv_scales is layer.kv_range is None for _, layer in paged_layers(model))


def test_a_layer_of_zeros_has_a_range_and_the_engine_takes_it() -> None:
    model = tiny_decoder(num_hidden_layers=1)
    attention: Any = model.layers[0].self_attn
    kernel = attention.qkv_proj.kernel
    kernel[...] = jnp.zeros_like(kernel[...])

    scales = calibrate_kv_cache(model, [[1, 2, 3]])

    assert list(scales.ranges.values()) == [(1.0, 1.0)]
    Engine(model, EngineConfig(**SIZES, kv_cache_dtype="fp8", kv_cache_scales=scales))


def test_random_prompts_are_the_same_for_one_seed(model) -> None:
    assert calibrate_kv_cache(model) == calibrate_kv_cache(model, seed=0) != calibrate_kv_cache(model, seed=1)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_a_layer_gives_what_it_gives_for_keys_and_values_that_were_rounded_before(dtype, seed) -> None:
    random = np.random.default_rng(seed)
    core = PagedAttention(4, 8, num_kv_heads=2, implementation="xla")
    query = jnp.asarray(random.normal(size=(5, 4, 8)), jnp.float32)
    key, value = (random.normal(size=(5, 2, 8)).astype(np.float32) for _ in range(2))
    metadata = AttentionMetadata.build([SequenceRow([1, 2], 0, 5)], block_size=4, num_blocks=3)
    scales = KVCacheScales({"layer": (float(np.abs(key).max()), float(np.abs(value).max()))}).of("layer", dtype)
    core.kv_scales = KVScales(*scales)

    found, _ = core(query, jnp.asarray(key), jnp.asarray(value), jnp.zeros((3, 2, 4, 2, 8), dtype), metadata)

    stored = np.rint if dtype == "int8" else lambda x: x
    rounded = [
        np.asarray(stored(each / np.float32(scale)).astype(jnp.dtype(dtype)), np.float32) * np.float32(scale)
        for each, scale in zip((key, value), scales, strict=True)
    ]
    plain = jnp.zeros((3, 2, 4, 2, 8), jnp.float32)
    expected, _ = core(query, jnp.asarray(rounded[0]), jnp.asarray(rounded[1]), plain, metadata)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(rounded[1]).max())


@pytest.mark.nightly
def test_the_likeliest_tokens_of_a_trained_model_are_nearly_always_those_of_a_plain_cache(tmp_path) -> None:
    model, _, tokenizer = load_model(embedded_model_folder(), implementation="torch")
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "fixed_shapes": True}
    texts = ["The for statement is", "A class definition", "An exception is raised when", "The list of"]
    with LLM(model, tokenizer=tokenizer, config=EngineConfig(**sizes)) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
        said = [(*each.prompt_token_ids, *each.outputs[0].token_ids) for each in llm.generate(texts, greedy)]
        llm.calibrate_kv_cache(texts).save(tmp_path / "scales.json")
    scales = KVCacheScales.load(tmp_path / "scales.json")
    config = EngineConfig(**sizes, kv_cache_dtype="fp8", kv_cache_scales=scales)
    with LLM(model, tokenizer=tokenizer, config=config) as llm:
        assert llm.engine.pool_plan.spec.dtype == "float8_e4m3fn"
        outputs = llm.generate(said, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))

    ranks = [place[token].rank for each in outputs for token, place in _generated(each)]
    assert len(ranks) == 4 * 48
    assert np.mean(np.array(ranks) == 1) > 0.9


def _generated(output: RequestOutput) -> list[tuple[int, dict[int, Logprob]]]:
    assert output.prompt_logprobs is not None
    places = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return [(token, place) for token, place in places if place is not None][-48:]


def test_new_scales_compile_nothing_drop_cached_prefixes_and_take_hold(model, engine, seed) -> None:
    prompts = prompts_of(seed, 20, 7)
    scales = calibrate_kv_cache(model, prompts)
    coarse = KVCacheScales({path: (1e3 * k_max, 1e3 * v_max) for path, (k_max, v_max) in scales.ranges.items()})
    first = run(engine, prompts)
    before = engine.num_compilations

    engine.set_kv_cache_scales(coarse)
    request = engine.add(prompts[0], GREEDY)
    while engine.num_unfinished:
        engine.step()

    assert (engine.num_compilations, request.num_cached_tokens) == (before, 0)
    again = Engine(model, EngineConfig(**SIZES, kv_cache_dtype="fp8", kv_cache_scales=coarse))
    assert run(engine, prompts) == run(again, prompts)
    assert engine.cache_stats().used == 0
    assert len(first) == 2


def test_without_scales_a_unit_of_fp8_is_worth_1_and_a_warning_says_so(model, seed, caplog) -> None:
    engine = Engine(model, EngineConfig(**SIZES, kv_cache_dtype="fp8_e4m3"))
    ones = KVCacheScales(dict.fromkeys(calibrate_kv_cache(model).ranges, (448.0, 448.0)))

    assert [record.event for record in caplog.records] == ["kv_cache_without_scales"]
    prompts = prompts_of(seed, 9)
    before = run(engine, prompts)
    engine.set_kv_cache_scales(ones)
    assert run(engine, prompts) == before


def test_int8_without_scales_is_refused_and_with_them_served(model, seed) -> None:
    with pytest.raises(InvalidInput) as error:
        Engine(model, EngineConfig(**SIZES, kv_cache_dtype="int8"))
    assert str(error.value) == (
        "kv_cache_dtype is int8 and there are no scales, without which it keeps nothing. Measure them: "
        "EngineConfig(kv_cache_scales=calibrate_kv_cache(model, prompts)), or take 'fp8'."
    )
    prompts = prompts_of(seed, 9, 20)
    config = EngineConfig(**SIZES, kv_cache_dtype="int8", kv_cache_scales=calibrate_kv_cache(model, prompts))
    assert run(Engine(model, config), prompts) == run(Engine(model, EngineConfig(**SIZES)), prompts)


def test_a_checkpoints_scales_are_honoured(model) -> None:
    graph, state = nnx.split(model)
    carrying = nnx.merge(graph, state)
    attention: Any = carrying.layers[0].self_attn
    attention.set_kv_scales(0.25, 0.5)

    fp8 = Engine(carrying, EngineConfig(**SIZES, kv_cache_dtype="fp8"))
    int8 = Engine(carrying, EngineConfig(**SIZES, kv_cache_dtype="int8"))

    path = "layers.0.self_attn.paged_attention"
    for engine, unit in ((fp8, 1.0), (int8, 448 / 127)):
        weights = engine._core.device.runner.weights
        found = [
            float(weights.leaves[weights._places[f"{path}.kv_scales.{name}"]][0]) for name in ("k_scale", "v_scale")
        ]
        np.testing.assert_allclose(found, [0.25 * unit, 0.5 * unit], rtol=1e-6)


def test_a_checkpoints_scales_are_saved_with_it(tmp_path) -> None:
    carrying, config, tokenizer = load_model(write_tiny_model(tmp_path / "without", 0))
    attention: Any = carrying.layers[0].self_attn
    attention.set_kv_scales(0.25, 0.5)

    save_model(tmp_path / "with", carrying, config, tokenizer)

    loaded: Any = load_model(tmp_path / "with")[0]
    scales = loaded.layers[0].self_attn.paged_attention.kv_scales
    assert scales is not None
    assert (scales.k_scale[...].item(), scales.v_scale[...].item()) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (
            lambda model: EngineConfig(kv_cache_dtype="fp7"),
            InvalidInput,
            (
                "kv_cache_dtype is 'fp7'; it must be one of auto, fp8, fp8_e4m3, fp8_e5m2, int8, fp8_ds_mla, "
                "float32, bfloat16, float16, float8_e4m3fn, float8_e5m2."
            ),
        ),
        (
            lambda model: Engine(model, EngineConfig(kv_cache_dtype="bfloat16")),
            InvalidInput,
            (
                "kv_cache_dtype is 'bfloat16'; this model's cache can be 'auto' (its own float32), 'fp8', 'fp8_e4m3', "
                "'fp8_e5m2', 'int8'."
            ),
        ),
        (
            lambda model: EngineConfig(kv_cache_scales=A_PATH),
            InvalidInput,
            "kv_cache_scales is 'scales.json'; it must be KVCacheScales, which load() reads from a file, or None.",
        ),
        (
            lambda model: KVCacheScales({"a": (0.0, 1.0)}),
            InvalidInput,
            "ranges['a'] is (0.0, 1.0); it must be two floats from 1e-33 to 3e+38.",
        ),
        (
            lambda model: KVCacheScales({"a": (1e300, 1.0)}),
            InvalidInput,
            "ranges['a'] is (1e+300, 1.0); it must be two floats from 1e-33 to 3e+38.",
        ),
        (
            lambda model: Engine(model, EngineConfig(kv_cache_dtype="fp8", kv_cache_scales=KVCacheScales({}))),
            InvalidInput,
            "kv_cache_scales has no layer 'layers.0.self_attn.paged_attention'; it has [].",
        ),
        (
            lambda model: Engine(model).set_kv_cache_scales(KVCacheScales({})),
            InvalidInput,
            "the cache is float32, which has no scales; EngineConfig(kv_cache_dtype='fp8') has.",
        ),
        (
            lambda model: calibrate_kv_cache(model, [[1], [97]]),
            InvalidInput,
            "token 0 of prompts[1] is 97; ids are 0 to 96.",
        ),
        (
            lambda model: calibrate_kv_cache(model, [[]]),
            InvalidInput,
            "prompts[0] must be a flat sequence of token ids.",
        ),
        (
            lambda model: calibrate_kv_cache(model, []),
            InvalidInput,
            "prompts is empty; pass at least one, or None for random ones.",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(model, act, kind, message) -> None:
    with pytest.raises(kind) as error:
        act(model)

    assert str(error.value) == message


def test_a_file_of_something_else_is_refused(tmp_path) -> None:
    (tmp_path / "other.json").write_text('{"kv_cache_ranges": {"a": 3}}')

    with pytest.raises(InvalidInput, match="must hold"):
        KVCacheScales.load(tmp_path / "other.json")


def latent_decoder(**changes: Any) -> Decoder:
    """A decoder of one layer of latents that can be packed."""
    sizes: dict[str, Any] = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 128}
    return tiny_decoder(
        num_hidden_layers=1, num_key_value_heads=4, head_dim=4, latent=LatentConfig(**(sizes | changes))
    )


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_latents_are_read_as_they_were_rounded(dtype, seed) -> None:
    random = np.random.default_rng(seed)
    sizes: dict[str, Any] = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    attn = MultiHeadLatentAttention(2, 12, **sizes, implementation="xla", rngs=nnx.Rngs(0))
    metadata = AttentionMetadata.build([SequenceRow([1, 2], 0, 5)], block_size=4, num_blocks=3)
    inputs = jnp.asarray(random.normal(size=(5, 12)), jnp.float32)
    attn.kv_scales = KVScales(*KVCacheScales({"layer": (9.0, 9.0)}).of("layer", dtype))

    found, cache = attn(inputs, cache=jnp.zeros((3, 4, 20), dtype), metadata=metadata)

    _, exact = attn(inputs, cache=jnp.zeros((3, 4, 20)), metadata=metadata)
    (scale,) = attn.kv_scales.k_scale[...]
    stored = cache.astype(jnp.float32) * scale
    half_a_digit = 2.0 ** -(jnp.finfo(dtype).nmant + 1)
    smallest = float(scale) * float(jnp.finfo(dtype).smallest_subnormal)
    np.testing.assert_allclose(stored, exact, rtol=half_a_digit, atol=smallest)
    query, *_ = attn._projected(inputs, metadata.positions(5))
    attended = attn._absorbed(query, stored, metadata.sequences)
    np.testing.assert_allclose(found, attn.o_proj(attended.reshape(5, -1)), rtol=0, atol=1e-6 * np.abs(found).max())


def test_calibration_finds_the_largest_element_of_a_row_of_latents(seed) -> None:
    model, prompt = latent_decoder(), prompts_of(seed, 12)[0]
    metadata = AttentionMetadata.build([SequenceRow([1], 0, 12)], block_size=64, num_blocks=2)
    cache = jnp.zeros(model.paged_spec.cache_spec(64).shape(2))
    _, (cache,) = step(model, jnp.asarray(prompt), jnp.arange(12), (cache,), metadata)

    ((path, found),) = calibrate_kv_cache(model, [prompt]).ranges.items()

    assert path == "layers.0.self_attn"
    np.testing.assert_allclose(found, [np.abs(cache).max()] * 2, rtol=1e-5)


@pytest.mark.nightly
def test_latents_of_8_bits_and_packed_ones_bring_the_tokens_of_plain_ones(seed) -> None:
    model, prompts = latent_decoder(), prompts_of(seed, 9)
    scales = calibrate_kv_cache(model, prompts)
    sizes: dict[str, Any] = SIZES | {"max_num_seqs": 1, "num_scheduler_steps": 1}
    configs = (
        EngineConfig(**sizes),
        EngineConfig(**sizes, kv_cache_dtype="fp8", kv_cache_scales=scales),
        EngineConfig(**sizes, kv_cache_dtype="fp8_ds_mla"),
    )

    engines = [Engine(model, config) for config in configs]

    assert [engine.pool_plan.spec.dtype for engine in engines] == ["float32", "float8_e4m3fn", "uint8"]
    plain, *others = (run(engine, prompts) for engine in engines)
    assert others == [plain, plain]


def test_scales_of_packed_rows_and_8_bits_beside_an_indexer_are_refused() -> None:
    model = latent_decoder()
    packed = EngineConfig(kv_cache_dtype="fp8_ds_mla", kv_cache_scales=KVCacheScales({}))
    with pytest.raises(InvalidInput, match="kv_cache_scales is given and kv_cache_dtype is 'fp8_ds_mla'"):
        Engine(model, packed)
    chosen = latent_decoder(q_lora_rank=8, index_n_heads=2, index_head_dim=8, index_topk=4)
    with pytest.raises(Unsupported, match="kv_cache_dtype is 'fp8' and the model has an indexer"):
        Engine(chosen, EngineConfig(kv_cache_dtype="fp8"))
    with pytest.raises(Unsupported, match="has an indexer, and so no scales"):
        calibrate_kv_cache(chosen)


def test_layers_that_know_no_scales_are_refused() -> None:
    class Bare(nnx.Module):
        paged_spec = tiny_decoder(num_hidden_layers=1).paged_spec

        def logits(self, hidden: Any) -> Any:
            return hidden

    bare: Any = Bare()
    with pytest.raises(Unsupported, match="0 of 1 layers with a cache are a PagedAttention"):
        Engine(bare, EngineConfig(kv_cache_dtype="fp8"))
    with pytest.raises(Unsupported, match="Bare has no PagedAttention, and so no scales"):
        calibrate_kv_cache(bare)
