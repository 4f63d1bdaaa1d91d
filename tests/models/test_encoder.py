"""Encoders: BERT's hidden states are those of transformers, and a row's vector does not depend on its padding."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jattn.llm.engine import LLM, Engine
from jattn.llm.load import load_model, save_model
from jattn.llm.testing import compare_with_torch
from jattn.llm.text.embeddings import embed
from jattn.metadata import AttentionMetadata
from tests.support.tiny_models import reference_bound, tiny_config, tiny_model
from torch_core.base.errors import InvalidInput, RequestTooLong, Unsupported
from torch_core.metadata import SequenceRow

LENGTHS = (9, 4)


@pytest.fixture
def theirs(tmp_path, seed) -> Any:
    """A BertModel of transformers, saved in the test's folder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    model = transformers.BertModel(config).eval()
    model.save_pretrained(tmp_path)
    return model


def padded_tokens(seed):
    return np.random.default_rng(seed).integers(0, 99, (2, 9))


def expected_states(theirs, tokens, dtype):
    import torch

    mask = torch.tensor([[place < length for place in range(9)] for length in LENGTHS])
    with torch.no_grad():
        states = theirs.to(getattr(torch, dtype))(torch.from_numpy(tokens), attention_mask=mask).last_hidden_state
    return states.double().numpy()


def test_hidden_states_of_bert_are_those_of_transformers(theirs, tmp_path, seed):
    tokens = padded_tokens(seed)
    model, config, _ = load_model(tmp_path, with_tokenizer=False)
    *_, found = model.hidden_states(jnp.asarray(tokens, jnp.int32), lengths=jnp.asarray(LENGTHS))
    same_dtype, exact = (expected_states(theirs, tokens, dtype) for dtype in ("float32", "float64"))
    assert config.architecture == "BertModel"
    for row, length in enumerate(LENGTHS):
        bound = reference_bound(exact[row, :length], same_dtype[row, :length])
        assert np.abs(np.asarray(found[row, :length], np.float64) - exact[row, :length]).max() <= bound


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_vector_has_length_one_and_does_not_see_padding(theirs, tmp_path, seed, pooling):
    tokens = padded_tokens(seed)
    other = tokens.copy()
    other[1, LENGTHS[1] :] = 5
    model, _, _ = load_model(tmp_path, with_tokenizer=False)
    first, second = (
        model.embed(jnp.asarray(each, jnp.int32), jnp.asarray(LENGTHS), pooling=pooling) for each in (tokens, other)
    )
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(jnp.linalg.norm(first, axis=-1), 1, rtol=2.0**-20)


def test_the_mean_is_over_the_real_tokens(theirs, tmp_path, seed):
    tokens = padded_tokens(seed)
    model, _, _ = load_model(tmp_path, with_tokenizer=False)
    found = model.embed(jnp.asarray(tokens, jnp.int32), jnp.asarray(LENGTHS))
    means = [
        row[:length].mean(0) for row, length in zip(expected_states(theirs, tokens, "float64"), LENGTHS, strict=True)
    ]
    np.testing.assert_allclose(found, [mean / np.linalg.norm(mean) for mean in means], rtol=0, atol=2.0**-17)


def test_a_saved_encoder_has_every_tensor_but_the_pooler(theirs, tmp_path, seed):
    model, config, _ = load_model(tmp_path, with_tokenizer=False)
    save_model(tmp_path / "again", model, config)
    first, second = (
        safetensors.numpy.load((folder / "model.safetensors").read_bytes()) for folder in (tmp_path, tmp_path / "again")
    )
    kept = {f"bert.{name}": value for name, value in first.items() if not name.startswith("pooler.")}
    assert kept.keys() == second.keys()
    assert all(np.array_equal(kept[name], second[name]) for name in kept)


def test_an_encoder_generates_nothing(theirs, tmp_path):
    model, _, _ = load_model(tmp_path, with_tokenizer=False)
    metadata = AttentionMetadata.build([SequenceRow([1], 0, 3)], block_size=4, num_blocks=2)
    with pytest.raises(Unsupported, match=r"^this model is an encoder, which has no cache and generates nothing; use"):
        model(jnp.zeros(3, jnp.int32), jnp.arange(3), (), metadata)
    with pytest.raises(
        InvalidInput, match=r"^model is an encoder, which generates nothing; LLM\.embed gives vectors\.$"
    ):
        LLM(model).generate([[1]])
    with pytest.raises(
        InvalidInput, match=r"^model is an encoder, which generates nothing; its embed gives vectors\.$"
    ):
        Engine(model)
    with pytest.raises(Unsupported, match=r"is an encoder; logits and greedy tokens are compared\.$"):
        compare_with_torch(tmp_path)
    with pytest.raises(Unsupported, match=r"^this model is an encoder and has no output projection; use embed\.$"):
        model.forward_dense(jnp.zeros((1, 3), jnp.int32))


def test_another_pooling_is_refused(theirs, tmp_path):
    model, _, _ = load_model(tmp_path, with_tokenizer=False)
    with pytest.raises(InvalidInput, match=r"^pooling is 'max'; use 'mean', 'cls' or 'last'\.$"):
        model.embed(jnp.zeros((1, 3), jnp.int32), jnp.ones(1, jnp.int32), pooling="max")


def cosines(theirs, prompts, pooled):
    """As sentence-transformers does it: the mean of the last hidden states or one of them, made 1 long."""
    import torch

    vectors = []
    for prompt in prompts:
        with torch.no_grad():
            states = theirs.double()(torch.tensor([prompt])).last_hidden_state[0]
        vectors.append(torch.nn.functional.normalize(pooled(states), dim=0))
    stacked = torch.stack(vectors)
    return (stacked @ stacked.T).numpy()


@pytest.mark.parametrize(
    ("pooling", "pooled"),
    [
        ("mean", lambda states: states.mean(0)),
        ("cls", lambda states: states[0]),
        ("last", lambda states: states[-1]),
    ],
)
def test_similarities_of_prompts_are_those_of_transformers(theirs, tmp_path, seed, pooling, pooled):
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 99, length).tolist() for length in (3, 32, 1, 17, 9)]
    model, _, _ = load_model(tmp_path, with_tokenizer=False)
    with LLM(model) as llm:
        outputs = llm.embed(prompts, pooling=pooling)
    vectors = np.stack([output.outputs.embedding for output in outputs])
    assert [output.prompt_token_ids for output in outputs] == list(map(tuple, prompts))
    np.testing.assert_allclose(vectors @ vectors.T, cosines(theirs, prompts, pooled), rtol=0, atol=2.0**-17)


def test_a_decoder_has_vectors_too_of_any_length(seed):
    model = tiny_model(tiny_config(num_hidden_layers=1), seed)
    with LLM(model) as llm:
        (found,) = llm.embed([[1, 2, 3]], pooling="last", normalize=False)
    *_, hidden = model.hidden_states(jnp.asarray([[1, 2, 3]]))
    np.testing.assert_allclose(found.outputs.embedding, hidden[0, -1], rtol=0, atol=2.0**-17)


def test_prompts_without_a_vector_are_refused(theirs, tmp_path):
    model, _, _ = load_model(tmp_path, with_tokenizer=False)
    with LLM(model) as llm:
        with pytest.raises(InvalidInput, match=r"^prompts\[1\] is empty; it needs at least one token\.$"):
            llm.embed([[1], []])
        with pytest.raises(InvalidInput, match=r"^prompts\[0\]\[1\] is 99; token ids are 0 to 98\.$"):
            llm.embed([[1, 99]])
        with pytest.raises(RequestTooLong, match=r"^prompts\[0\] has 33 tokens; the model reads 32 at most\.$"):
            llm.embed([[1] * 33])
    with pytest.raises(Unsupported, match=r"^model is a NoneType; vectors come from encoders and from decoders alone"):
        embed(None, [[1]], pooling="mean", normalize=True)
