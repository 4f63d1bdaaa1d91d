"""Models of the user's own: what the engine asks of one, what it refuses, and a linen module behind the bridge."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from flax import linen, nnx

from jattn.llm.engine import LLM, Engine, EngineConfig, SamplingParams
from jattn.llm.models import PagedSpec
from jattn.metadata import AttentionMetadata
from jattn.nn import PagedAttention
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import prompts_of, run
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.metadata import SequenceRow

SIZES: dict[str, Any] = {"vocab_size": 97, "max_model_len": 64, "num_layers": 1, "num_kv_heads": 2, "head_dim": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
CONFIG = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=32)


class Wrapped(nnx.Module):
    """A decoder inside a module that shares nothing with it but the protocol."""

    def __init__(self, **changes: Any) -> None:
        self.inner = tiny_decoder()
        self.paged_spec = PagedSpec(**{**SIZES, "num_layers": 2, "max_model_len": 128, **changes})

    def __call__(self, token_ids: Any, positions: Any, kv_caches: Any, metadata: Any) -> Any:
        return self.inner(token_ids, positions, kv_caches, metadata)

    def logits(self, hidden: Any) -> Any:
        return self.inner.logits(hidden)


class LinenModel(linen.Module):
    """Bag of keys: attention over embeddings, all in linen."""

    def setup(self) -> None:
        self.embed = linen.Embed(97, 16)

    def __call__(self, token_ids: Any, positions: Any, kv_caches: Any, metadata: Any) -> Any:
        x = self.embed(token_ids)
        heads = x.reshape(-1, 2, 8)
        attended, cache = PagedAttention(2, 8, implementation="xla")(heads, heads, heads, kv_caches[0], metadata)
        return x + attended.reshape(x.shape), (cache,)

    def logits(self, hidden: Any) -> Any:
        return self.embed.attend(hidden)


class BridgedModel(nnx.bridge.ToNNX):
    paged_spec = PagedSpec(**SIZES)


def test_a_module_of_ones_own_says_what_the_decoder_in_it_says(decoder, seed) -> None:
    prompts = prompts_of(seed, 3, 9)

    assert run(Engine(Wrapped(), CONFIG), prompts) == run(Engine(decoder, CONFIG), prompts)


def test_an_llm_takes_a_module_of_ones_own_and_its_eos_token_ends_it(seed) -> None:
    (prompt,) = prompts_of(seed, 5)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    tokens = LLM(Wrapped(), config=CONFIG).generate(prompt, params)[0].outputs[0].token_ids

    ended = LLM(Wrapped(eos_token_ids=(tokens[2],)), config=CONFIG).generate(prompt, params)[0].outputs[0]

    assert (ended.token_ids, ended.finish_reason) == (tokens[: tokens.index(tokens[2]) + 1], "stop")


@pytest.mark.nightly
def test_a_linen_module_is_served_behind_the_bridge(seed) -> None:
    (prompt,) = prompts_of(seed, 7)
    linen_model, empty = LinenModel(), jnp.zeros((3, 2, 4, 2, 8))
    from_rows = PagedAttention(2, 8, implementation="xla")
    model: Any = BridgedModel(linen_model, rngs=nnx.Rngs(0))
    model.lazy_init(jnp.zeros(1, jnp.int32), None, (empty,), one_token_metadata())

    (tokens,) = run(Engine(model, CONFIG), [prompt], GREEDY)

    embedding, sequence = jnp.asarray(model.embed["embedding"]), [*prompt, *tokens]
    for end in range(len(prompt), len(sequence)):
        x = embedding[jnp.array(sequence[:end])]
        heads = x.reshape(-1, 2, 8)
        scores = jnp.einsum("hd,khd->hk", heads[-1], heads) * from_rows.head_dim**-0.5
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        attended = jnp.einsum("hk,khd->hd", weights / weights.sum(-1, keepdims=True), heads)
        assert int(((x[-1] + attended.reshape(-1)) @ embedding.T).argmax()) == sequence[end]


def one_token_metadata() -> AttentionMetadata:
    return AttentionMetadata.build([SequenceRow([1], 0, 1)], block_size=4, num_blocks=3)


class NoSpec(nnx.Module):
    def logits(self, hidden: Any) -> Any: ...


class NoLogits(nnx.Module):
    paged_spec = PagedSpec(**SIZES)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("folder", "model is a str; it must be an nnx.Module: a jattn.llm.models.PagedModel."),
        (
            NoSpec(),
            (
                "model is a NoSpec without a paged_spec; give it one, a jattn.llm.models.PagedSpec, as an "
                "attribute of its "
                "class or its own."
            ),
        ),
        (NoLogits(), "model is a NoLogits without logits(hidden); see jattn.llm.models.PagedModel."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_paged_model_is_refused_with_what_is_missing(model, message) -> None:
    with pytest.raises(InvalidInput) as error:
        Engine(model)

    assert str(error.value) == message


class Mistaken(Wrapped):
    """A module that returns something else."""

    def __init__(self, returned: Any, logits: Any = lambda logits: logits) -> None:
        super().__init__()
        self.returned, self.changed = returned, logits

    def __call__(self, token_ids: Any, positions: Any, kv_caches: Any, metadata: Any) -> Any:
        return self.returned(*super().__call__(token_ids, positions, kv_caches, metadata), kv_caches)

    def logits(self, hidden: Any) -> Any:
        return self.changed(super().logits(hidden))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Mistaken(lambda hidden, new, old: (hidden[:1], new)), r"hidden has shape \(1, 32\); .* each of the"),
        (Mistaken(lambda hidden, new, old: (hidden, old)), "kv_caches are those that the model was given"),
        (Mistaken(lambda hidden, new, old: (hidden, new), lambda each: each[:, 1:]), r"logits have shape \(\d, 96\)"),
    ],
    ids=["hidden", "kv_caches", "logits"],
)
def test_a_model_that_returns_something_else_is_refused(model: Any, message: str) -> None:
    engine = Engine(model, CONFIG)
    engine.add([1, 2, 3], GREEDY)

    with pytest.raises(InvalidInput, match=message):
        engine.step()


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"vocab_size": 0}, InvalidInput, "vocab_size is 0; it must be from 1 to 2147483647."),
        ({"num_layers": True}, InvalidInput, "num_layers is True; it must be an int from 1 to 2147483647."),
        ({"sliding_window": 0}, InvalidInput, "sliding_window is 0; it must be from 1 to 2147483647, or None."),
        ({"eos_token_ids": [3]}, InvalidInput, "eos_token_ids is [3]; it must be a tuple of token ids."),
        ({"eos_token_ids": (97,)}, InvalidInput, "eos_token_ids[0] is 97; it must be from 0 to 96."),
        ({"kv_lora_rank": 8}, InvalidInput, "num_kv_heads is 2; with kv_lora_rank it is 1: all heads share a latent."),
        ({"dtype": "int4"}, Unsupported, "dtype is 'int4'; a KV cache can be one of"),
    ],
)
def test_a_spec_out_of_range_names_the_field(changes, kind, message) -> None:
    with pytest.raises(kind) as error:
        PagedSpec(**{**SIZES, **changes})

    assert str(error.value).startswith(message)
