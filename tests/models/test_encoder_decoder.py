"""Encoder and decoder: T5's and BART's logits and tokens are those of transformers, dense, paged and in the engine."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jattn.llm.engine import LLM, EngineConfig, SamplingParams
from jattn.llm.engine.request.outputs import Outbox
from jattn.llm.engine.request.validation import Validator
from jattn.llm.load import load_model, parse_config
from jattn.llm.load.config import render_config
from jattn.llm.load.folder import read_object
from jattn.llm.models import EncoderDecoder, ModelConfig, PagedSpec
from jattn.llm.models.positions import relative_buckets
from jattn.metadata import AttentionMetadata
from tests.support.encoder_decoders import CASES, VARIANTS, reference_logits, write_checkpoint
from tests.support.saved import assert_saved_as_it_was
from tests.support.tiny_models import reference_bound, tiny_config, tiny_model
from torch_core.base.errors import InvalidInput, RequestTooLong, Unsupported
from torch_core.metadata import EncoderRow, SequenceRow

#: Of each family the variant in which most options are on.
LAST = [(architecture, len(variants) - 1) for architecture, (_, variants) in CASES.items()]
BLOCK, NUM_BLOCKS = 8, 24
# A step of a tiny model runs in a moment however it is compiled, and compiles in half the time.
QUICK = {"xla_backend_optimization_level": 0}


def tokens_of(seed, *shape):
    return np.random.default_rng(seed).integers(3, 99, shape)


@pytest.mark.parametrize(("architecture", "variant"), VARIANTS)
def test_dense_logits_are_those_of_transformers(architecture, variant, tmp_path, seed):
    folder = write_checkpoint(tmp_path, architecture, variant, seed)
    prompt, tokens = tokens_of(seed, 2, 30), tokens_of(seed + 1, 2, 20)
    model, _, _ = load_model(folder, with_tokenizer=False)
    found = dense(*nnx.split(model), tokens, prompt)
    exact, same_dtype = reference_logits(folder, prompt, tokens)
    assert np.abs(np.asarray(found) - exact).max() <= reference_bound(exact, same_dtype)


def test_what_lies_past_an_encoder_input_is_not_read(tiny, seed):
    prompt, tokens = tokens_of(seed, 2, 12), tokens_of(seed + 1, 2, 5)
    other = prompt.copy()
    other[1, 7:] = 5
    first, second = (dense(*nnx.split(tiny), tokens, each, jnp.asarray([12, 7])) for each in (prompt, other))
    np.testing.assert_array_equal(first, second)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def dense(graph, state, token_ids, encoder_token_ids, lengths=None):
    model = nnx.merge(graph, state)
    return model.forward_dense(token_ids, encoder_token_ids=encoder_token_ids, encoder_lengths=lengths)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def encoded(graph, state, token_ids, positions, caches, metadata):
    return nnx.merge(graph, state).encode(token_ids, positions, caches, metadata)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def decoded(graph, state, token_ids, positions, caches, metadata):
    model = nnx.merge(graph, state)
    hidden, caches = model(token_ids, positions, caches, metadata)
    return model.logits(hidden), caches


@pytest.mark.parametrize(("architecture", "variant"), [pytest.param(*LAST[0], marks=pytest.mark.nightly), LAST[1]])
def test_logits_over_a_cross_cache_in_chunks_are_those_of_transformers(architecture, variant, tmp_path, seed):
    """Two inputs side by side, in blocks out of order; every slot that nobody wrote is NaN."""
    folder = write_checkpoint(tmp_path, architecture, variant, seed)
    model, _, _ = load_model(folder, implementation="xla", with_tokenizer=False)
    split, spec = nnx.split(model), model.paged_spec
    prompts, tokens = [tokens_of(seed, 19), tokens_of(seed + 1, 9)], tokens_of(seed + 2, 2, 12)
    cross, own = [[7, 3, 9], [5, 2]], [[1, 8], [4, 6]]
    shape = spec.cache_spec(BLOCK).shape(NUM_BLOCKS)
    caches = tuple(jnp.full(shape, jnp.nan) for _ in range(spec.num_layers))
    pool = {"block_size": BLOCK, "num_blocks": NUM_BLOCKS}

    def inputs(rows, values, num_tokens, **options):
        sizes = {"num_tokens": num_tokens, "max_query_len": num_tokens, "max_blocks": 2}
        metadata = AttentionMetadata.build(rows, **pool, **(sizes | options))
        packed = np.zeros(num_tokens, np.int32)
        packed[: sum(map(len, values))] = np.concatenate(values)
        return jnp.asarray(packed), metadata.positions(num_tokens), caches, metadata

    rows = [SequenceRow(blocks, 0, len(prompt)) for blocks, prompt in zip(cross, prompts, strict=True)]
    caches = encoded(*split, *inputs(rows, prompts, 32, max_blocks=3))
    encoder_rows = [EncoderRow(blocks, len(prompt)) for blocks, prompt in zip(cross, prompts, strict=True)]
    found = []
    for start, end in ((0, 7), (7, 11), (11, 12)):
        rows = [SequenceRow(blocks, start, end - start) for blocks in own]
        step = inputs(rows, tokens[:, start:end], 16, encoder_rows=encoder_rows)
        logits, caches = decoded(*split, *step)
        found.append(logits[: 2 * (end - start)].reshape(2, end - start, -1))
    for row, prompt in enumerate(prompts):
        exact, same_dtype = reference_logits(folder, prompt[None], tokens[row : row + 1])
        error = np.abs(np.concatenate([each[row] for each in found]) - exact[0]).max()
        assert error <= reference_bound(exact, same_dtype)


def assert_greedy_as_transformers(folder, llm, prompts, *, max_tokens):
    """A tie may go either way."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate([prompt.tolist() for prompt in prompts], params)
    start = llm.model.paged_spec.decoder_start_token_id
    for prompt, output in zip(prompts, outputs, strict=True):
        chosen = output.outputs[0].token_ids
        assert output.prompt_token_ids == tuple(prompt.tolist())
        exact, same_dtype = reference_logits(folder, prompt[None], np.asarray([[start, *chosen[:-1]]]))
        short = exact[0].max(-1) - exact[0][np.arange(max_tokens), list(chosen)]
        assert (short <= 2 * reference_bound(exact, same_dtype)).all()
    return outputs


@pytest.mark.parametrize(("architecture", "variant"), LAST[:1])
def test_the_engine_decodes_what_transformers_would(architecture, variant, tmp_path, seed):
    """More requests than places, inputs of several lengths, one of them twice: its encoder's blocks are found."""
    folder = write_checkpoint(tmp_path, architecture, variant, seed)
    model, _, _ = load_model(folder, implementation="xla", with_tokenizer=False)
    sizes = EngineConfig(
        block_size=BLOCK, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=32, fixed_shapes=True
    )
    with LLM(model, config=sizes) as llm:
        prompts = [tokens_of(seed, 21), tokens_of(seed + 1, 1), tokens_of(seed + 2, 33), tokens_of(seed, 21)]
        outputs = assert_greedy_as_transformers(folder, llm, prompts, max_tokens=12)
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 21]
        assert outputs[0].outputs[0].token_ids == outputs[3].outputs[0].token_ids
        assert llm.engine.cache_stats().used == 0


@pytest.mark.nightly
@pytest.mark.parametrize("num_host_blocks", [0, 20])
@pytest.mark.parametrize(("architecture", "variant"), VARIANTS)
def test_requests_that_were_preempted_are_encoded_again_or_swapped(
    architecture, variant, num_host_blocks, tmp_path, seed
):
    """The pool holds little more than one request's blocks; the samples of one prompt share its encoder's."""
    folder = write_checkpoint(tmp_path, architecture, variant, seed)
    model, _, _ = load_model(folder, implementation="xla", with_tokenizer=False)
    sizes = EngineConfig(
        block_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        max_model_len=28,
        num_scheduler_steps=1,
        num_blocks=32,
        num_host_blocks=num_host_blocks,
        fixed_shapes=True,
    )
    with LLM(model, config=sizes) as llm:
        prompts = [tokens_of(seed + index, 24 - index) for index in range(3)]
        assert_greedy_as_transformers(folder, llm, prompts, max_tokens=24)
        stats = llm.engine.cache_stats()
        assert stats.preemptions > 0 or num_host_blocks
        assert (stats.swapped_in > 0) == (num_host_blocks > 0)
        twice = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, n=2)
        first, second = llm.generate([prompts[0].tolist()], twice)[0].outputs
        assert first.token_ids == second.token_ids
        assert llm.engine.cache_stats().forks == stats.forks + 1


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [{}, {"d_model": 64, "vocab_size": 203}], ids=["small", "larger"])
@pytest.mark.parametrize(("architecture", "variant"), VARIANTS)
def test_every_variant_in_two_sizes_decodes_what_transformers_would(architecture, variant, sizes, tmp_path, seed):
    folder = write_checkpoint(tmp_path, architecture, variant, seed, **sizes)
    model, _, _ = load_model(folder, implementation="xla", with_tokenizer=False)
    with LLM(model, config=EngineConfig(block_size=8, max_num_seqs=4, max_model_len=80)) as llm:
        prompts = [tokens_of(seed + length, length) for length in (70, 3, 40, 70)]
        assert_greedy_as_transformers(folder, llm, prompts, max_tokens=64)


@pytest.mark.parametrize(("architecture", "variant"), VARIANTS)
def test_a_checkpoint_is_saved_as_the_tensors_that_it_was(architecture, variant, tmp_path, seed):
    assert_saved_as_it_was(write_checkpoint(tmp_path / "theirs", architecture, variant, seed), tmp_path / "ours")


def test_version_1_1_of_t5_has_an_output_projection_of_its_own(tmp_path, seed):
    """As its first files say it; transformers 5 writes them another way."""
    folder = write_checkpoint(tmp_path, "T5ForConditionalGeneration", 1, seed)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"tie_word_embeddings": False, "scale_decoder_outputs": None}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = safetensors.numpy.load((folder / "model.safetensors").read_bytes())
    tensors["lm_head.weight"] = np.flip(tensors["shared.weight"], 0).copy()
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"]
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    model, config, _ = load_model(folder, with_tokenizer=False)
    assert model.lm_head is not None
    assert (config.tie_word_embeddings, config.logits_scale) == (False, 1.0)
    np.testing.assert_array_equal(model.lm_head.kernel[...].T, tensors["lm_head.weight"])


@pytest.mark.parametrize("is_encoder", [True, False])
def test_distances_have_the_buckets_of_transformers(is_encoder):
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    for num_buckets in (4, 6, 8, 10, 16, 32, 64):
        for furthest in {num_buckets, 20 + num_buckets, 128, 300}:
            config = relative_config(num_buckets, furthest, is_encoder)
            distances = torch.arange(-furthest, furthest + 1)
            expected = t5.T5Attention._relative_position_bucket(distances, is_encoder, num_buckets, furthest)
            np.testing.assert_array_equal(relative_buckets(config), expected.numpy())


def relative_config(num_buckets, furthest, is_encoder):
    return tiny_config(
        position_embedding="relative",
        relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=furthest,
        is_encoder=is_encoder,
    )


def with_encoder(**changes) -> ModelConfig:
    encoder = tiny_config(is_encoder=True, num_hidden_layers=1, bos_token_id=None, eos_token_ids=())
    return tiny_config(encoder=encoder, decoder_start_token_id=0, **changes)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return tiny_model(with_encoder(num_hidden_layers=1, max_position_embeddings=40), 0)


def test_a_prompt_that_the_encoder_cannot_read_is_refused(tiny):
    config = EngineConfig(block_size=8, max_num_seqs=2, max_num_batched_tokens=32)
    with LLM(tiny, config=config) as llm:
        with pytest.raises(RequestTooLong, match=r"^the prompt has 257 tokens; the model's encoder was made"):
            llm.generate([[1] * 257])
        with pytest.raises(RequestTooLong, match=r"^the prompt takes 40 slots; an encoder reads it in one"):
            llm.generate([[1] * 33])
        with pytest.raises(Unsupported, match=r"^prompt_logprobs is given; the prompt is read by this model's encoder"):
            llm.generate([[1]], SamplingParams(prompt_logprobs=1))
        with pytest.raises(RequestTooLong, match=r"^max_tokens is 40; this engine's max_model_len is 40"):
            llm.generate([[1] * 9], SamplingParams(max_tokens=40))


def test_a_prompt_is_truncated_to_what_the_encoder_reads_in_one_step(tiny):
    config = EngineConfig(block_size=8, max_num_seqs=2, max_num_batched_tokens=36)
    prompt = list(range(1, 100))

    with LLM(tiny, config=config) as llm:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, truncate_prompt_tokens=-1))

    assert output.prompt_token_ids == tuple(prompt[-32:])


def test_several_inputs_of_the_encoder_may_be_longer_than_what_the_decoder_says(tiny):
    config = EngineConfig(block_size=BLOCK, max_num_seqs=2, max_num_batched_tokens=128, max_model_len=8)
    with LLM(tiny, config=config) as llm:
        runner = llm.engine._core.device.runner
        assert max(each.max_query_len for each in runner.buckets.all() if each.encodes and each.num_seqs == 2) >= 40


def test_a_generation_starts_with_the_tokens_that_the_folder_forces(tmp_path, seed):
    folder = write_checkpoint(tmp_path, "BartForConditionalGeneration", 0, seed)
    raw = read_object(folder, "config.json") | {"decoder_start_token_id": 2, "forced_bos_token_id": 5}
    (folder / "config.json").write_text(json.dumps(raw))
    assert started(folder) == (2, 5)
    (folder / "generation_config.json").write_text('{"decoder_start_token_id": 3, "forced_bos_token_id": 7}')
    assert started(folder) == (3, 7)
    (folder / "generation_config.json").write_text('{"forced_bos_token_id": 99}')
    with pytest.raises(
        InvalidInput, match=r"^generation_config\.json: forced_bos_token_id is 99; it must be a token id"
    ):
        started(folder)


def started(folder):
    """What the decoder reads before its first new token."""
    model, config, _ = load_model(folder, with_tokenizer=False)
    assert parse_config(render_config(config, dtype="float32")) == config
    validator = Validator(model.paged_spec, EngineConfig(), None)
    return validator.requests([8], None, outbox=Outbox())[0].prompt_token_ids


def test_a_step_without_the_blocks_of_the_encoder_is_refused(tiny):
    metadata = AttentionMetadata.build([SequenceRow([1], 0, 3)], block_size=4, num_blocks=2)
    caches = (jnp.zeros(tiny.paged_spec.cache_spec(4).shape(2)),)
    with pytest.raises(InvalidInput, match=r"^metadata\.cross is None; a model with an encoder needs the blocks of"):
        tiny(jnp.zeros(3, jnp.int32), jnp.arange(3), caches, metadata)
    with pytest.raises(InvalidInput, match=r"^encoder_token_ids is None; a model with an encoder needs its input\.$"):
        tiny.forward_dense(jnp.zeros((1, 3), jnp.int32))
    with pytest.raises(InvalidInput, match=r"^config\.encoder is None; an EncoderDecoder needs the encoder's Mode"):
        EncoderDecoder(tiny_config(), rngs=nnx.Rngs(0))


def test_configs_with_an_encoder_that_does_not_fit_are_refused():
    encoder = with_encoder().encoder
    assert encoder is not None
    with pytest.raises(InvalidInput, match=r"^encoder is given; the model that reads it is no encoder itself and"):
        tiny_config(encoder=encoder)
    with pytest.raises(InvalidInput, match=r"; it must be a ModelConfig with is_encoder, or None\.$"):
        tiny_config(encoder=tiny_config(), decoder_start_token_id=0)
    with pytest.raises(Unsupported, match=r"^encoder\.head_dim is 8 and the decoder's 16; this build has the same in"):
        tiny_config(encoder=dataclasses.replace(encoder, head_dim=8), decoder_start_token_id=0)
    with pytest.raises(Unsupported, match=r"^parallel_block is 'two_norms' and norm_placement 'before'; with an encod"):
        with_encoder(parallel_block="two_norms")
    with pytest.raises(InvalidInput, match=r"^decoder_start_token_id is 3 and max_encoder_len 0; a model without an"):
        PagedSpec(vocab_size=9, max_model_len=8, num_layers=1, num_kv_heads=1, head_dim=8, decoder_start_token_id=3)
