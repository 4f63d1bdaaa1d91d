"""What XLA's passes for a GPU leave of calls that update in place. Nightly: needs JAX's CUDA plugin, but no GPU."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import ops
from jattn.bench.shapes import shape_config
from jattn.llm.engine.device.programs import PRODUCT_OPTIONS
from jattn.llm.models import Decoder, Fp8Linear
from jattn.llm.models.latent import with_split_expansions
from jattn.llm.models.layers import dot_general
from jattn.llm.models.mixers import MambaConfig
from jattn.llm.models.parts import LatentConfig
from jattn.llm.models.quantized import round_to_fp8
from jattn.metadata import AttentionMetadata
from jattn.nn import GatedDeltaNet, KimiDeltaAttention, Mamba2
from tests.ops import test_sliced_caches as sliced
from tests.support.for_cuda import compiled_for_cuda, computations, why_not
from tests.support.tiny_models import tiny_config, tiny_model

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

# Blocks of 16 tokens, two key/value heads of 16: what a tiny decoder's layers have.
CACHE = (32, 2, 16, 2, 16)
WAYS = [sliced.by_scan, sliced.by_scan_that_reads_too, sliced.by_index, sliced.by_vmap, sliced.by_vmap_over_rows]


def sliced_caches(way: str) -> tuple[Any, ...]:
    caches = np.zeros((sliced.LAYERS, sliced.BLOCKS, 2, sliced.BLOCK_SIZE, sliced.HEADS, sliced.SIZE), np.float32)
    rows = np.zeros((sliced.LAYERS, sliced.TOKENS, sliced.HEADS, sliced.SIZE), np.float32)
    return functools.partial(getattr(sliced, way), implementation="triton"), caches, rows


def misdirected(text: str) -> list[str]:
    """Calls in fusions whose updates do not go where XLA says: their operand or their result is part of an array."""
    found = []
    for name, lines in computations(text).items():
        if "dynamic-slice-fusion" not in name:
            continue
        call = next(line for line in lines if " custom-call(" in line)
        aliases = re.search(r"output_to_operand_aliasing=\{(.*?)\}, api", call)
        if aliases is None:
            continue
        operands = re.search(r" custom-call\((.*?)\), custom_call_target", call)
        assert operands is not None, call
        names = [operand.split()[-1] for operand in operands[1].split(", ")]
        updated = {names[int(index)] for index in re.findall(r"\((\d+), \{\}\)", aliases[1])}
        whole = {line.split(" = ")[0].removeprefix("ROOT ") for line in lines if " parameter(" in line}
        if not updated <= whole or any(" dynamic-update-slice(" in line for line in lines):
            found.append(call)
    return found


@pytest.mark.parametrize("donate", [(), (0,)], ids=["kept", "donated"])
@pytest.mark.parametrize("way", [way.__name__ for way in WAYS])
def test_no_slice_is_folded_into_a_call_that_updates_it(way: str, donate: tuple[int, ...]) -> None:
    text = compiled_for_cuda(sliced_caches, way, donate=donate)
    assert "output_to_operand_aliasing" in text
    assert misdirected(text) == []


def decode_steps(num_steps: int, num_seqs: int) -> tuple[Any, ...]:
    """Steps of a small decoder, each on the tokens and caches of the one before, in one program."""
    model = tiny_model(tiny_config(num_hidden_layers=3), 0, "triton")
    graph, state = nnx.split(model)
    caches = tuple(np.zeros(CACHE, np.float32) for _ in range(3))

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        caches, tokens, lengths, state = carry
        metadata = AttentionMetadata(
            block_tables=jnp.tile(jnp.arange(1, 3, dtype=jnp.int32), (num_seqs, 1)), seq_lens=lengths,
            query_start_loc=jnp.arange(num_seqs + 1, dtype=jnp.int32), slot_mapping=lengths + 15, max_query_len=1,
        )  # fmt: skip
        decoder = nnx.merge(graph, state)
        hidden, caches = decoder(tokens, lengths - 1, caches, metadata)
        tokens = jnp.argmax(decoder.logits(hidden), axis=-1).astype(jnp.int32)
        return (caches, tokens, lengths + 1, state), tokens

    def steps(caches: Any, tokens: Any, lengths: Any, state: Any) -> Any:
        carry, tokens = jax.lax.scan(step, (caches, tokens, lengths, state), None, length=num_steps)
        return carry[0], tokens

    return steps, caches, np.zeros(num_seqs, np.int32), np.ones(num_seqs, np.int32), state


@pytest.mark.parametrize("num_seqs", [1, 5])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_steps_of_a_decoder_copy_no_cache_that_was_donated(num_steps: int, num_seqs: int) -> None:
    text = compiled_for_cuda(decode_steps, num_steps, num_seqs, donate=(0,))
    assert text.count("output_to_operand_aliasing") >= 3
    shape = ",".join(map(str, CACHE))
    assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", text)
    assert misdirected(text) == []


def sliced_lengths(first: int) -> tuple[Any, ...]:
    """Attention to caches of sequences whose lengths are a slice of an array, and whose queries are one of another."""

    def attend(query: Any, cache: Any, tables: Any, lengths: Any) -> Any:
        starts = jnp.arange(65, dtype=jnp.int32)
        rows = (query[first : first + 64], cache, tables, lengths[first : first + 64], starts)
        return ops.paged_attention(*rows, max_query_len=1, implementation="triton")

    query, lengths = np.zeros((66, 4, 16), np.float32), np.zeros(66, np.int32)
    return attend, query, np.zeros(CACHE, np.float32), np.zeros((64, 6), np.int32), lengths


def test_a_slice_that_could_begin_between_two_multiples_of_16_bytes_is_folded_into_no_call() -> None:
    # On by default from jaxlib 0.11.1.
    text = compiled_for_cuda(sliced_lengths, 1, options={"xla_gpu_enable_dynamic_slice_fusion": True})
    parts = computations(text)
    (fusion,) = [lines for name, lines in parts.items() if "dynamic-slice-fusion" in name]
    assert [line.split(" = ")[1].split("{")[0] for line in fusion if " slice(" in line] == ["f32[64,4,16]"]


def two_products() -> tuple[Any, ...]:
    """Products of the same rows with two weights, neither of which is many times larger: those jaxlib 0.11.2 merges."""
    weights = (np.zeros((64, size), np.float32) for size in (256, 64))
    return lambda x, large, small: (x @ large, x @ small), np.zeros((16, 64), np.float32), *weights


def test_weights_of_two_products_are_not_copied_together() -> None:
    copied = "f32[64,320]"
    assert copied in compiled_for_cuda(two_products), "XLA has stopped doing it: the option is no longer needed"
    assert copied not in compiled_for_cuda(two_products, options=PRODUCT_OPTIONS)


def decoding(num_seqs: int) -> AttentionMetadata:
    """The metadata of a step in which each sequence decodes a token."""
    numbers = jnp.arange(num_seqs + 1, dtype=jnp.int32)
    return AttentionMetadata(
        block_tables=jnp.ones((num_seqs, 2), jnp.int32), seq_lens=jnp.full(num_seqs, 5, jnp.int32), max_query_len=1,
        query_start_loc=numbers, slot_mapping=numbers[:-1] + 16, state_slots=numbers[1:],
    )  # fmt: skip


def hybrid_step() -> tuple[Any, ...]:
    """A decode step of a small model of Mamba-2 and attention."""
    model = Decoder(shape_config("tiny-hybrid"), rngs=nnx.Rngs(0), implementation="triton")
    graph, state = nnx.split(model)
    spec = model.paged_spec
    caches = [np.zeros((9, 2, 16, spec.num_kv_heads, spec.head_dim), np.float32)]
    caches += [np.zeros((7, *shape), np.float32) for each in spec.states for shape in each.shapes]
    metadata = decoding(4)

    def step(caches: Any, tokens: Any, state: Any) -> Any:
        return nnx.merge(graph, state)(tokens, tokens, tuple(caches), metadata)

    return step, caches, np.zeros(4, np.int32), state


def test_a_decode_step_replaces_states_where_they_are() -> None:
    text = compiled_for_cuda(hybrid_step, donate=(0,))
    assert text.count("output_to_operand_aliasing") >= 3
    for shape in ("7,3,64", "7,4,8,8"):
        assert f"f32[{shape}]" in text
        assert not re.findall(rf"= f32\[{shape}\]\S* (copy|fusion)\(", text)


def decoded(kind: str) -> tuple[Any, ...]:
    """A decode step of a layer with a state."""
    options: dict[str, Any] = {"param_dtype": jnp.bfloat16, "implementation": "triton", "rngs": nnx.Rngs(0)}
    ones: Any = (1.0,) * 5
    layer: Any = {
        "delta rule": lambda: GatedDeltaNet(8, 64, num_kv_heads=4, key_dim=16, value_dim=16, **options),
        "channels": lambda: KimiDeltaAttention(8, 64, head_dim=16, full_rank_gates=True, **options),
        "mamba": lambda: Mamba2(8, 64, head_dim=16, state_size=16, num_groups=2, multipliers=ones, **options),
    }[kind]()
    graph, weights = nnx.split(layer)
    spec = layer.state_spec()
    states = tuple(np.zeros((17, *shape), dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    metadata = decoding(8)

    def step(states: Any, x: Any, weights: Any) -> Any:
        return nnx.merge(graph, weights)(x, states=states, metadata=metadata)

    return step, states, jnp.zeros((8, 64), jnp.bfloat16), weights


@pytest.mark.parametrize("kind", ["delta rule", "channels", "mamba"])
def test_norm_and_gate_of_a_layer_with_a_state_are_one_kernel(kind: str) -> None:
    text = compiled_for_cuda(decoded, kind, donate=(0,))
    *_, between = text[text.index("ENTRY") :].split('custom_call_target="triton_kernel_call_ffi"')
    between = between.split('custom_call_target="__cublas')[0]
    assert between.count(" fusion(") == 1


@pytest.mark.parametrize("kind", ["delta rule", "channels", "mamba"])
def test_a_convolution_reads_and_writes_columns_where_they_are(kind: str) -> None:
    text = compiled_for_cuda(decoded, kind, donate=(0,))
    assert not re.findall(r"%wrapped_slice\S* = bf16", text[text.index("ENTRY") :])


def test_xla_computes_nothing_for_the_kernels_of_mamba_but_the_product() -> None:
    text = compiled_for_cuda(decoded, "mamba", donate=(0,))
    before, _ = text[text.index("ENTRY") :].rsplit('custom_call_target="triton_kernel_call_ffi"', 1)
    assert re.findall(r" s32\S* fusion\(", before)
    assert not re.findall(r" b?f(?:16|32)\S* fusion\(", before)


def shared_step() -> tuple[Any, ...]:
    """A decode step of a small model whose attention and Mamba-2 share a product."""
    sizes = MambaConfig(num_heads=4, head_dim=16, state_size=16)
    config = tiny_config(layer_types=("attention_mamba",) * 2, mamba=sizes, dtype="bfloat16")
    model = Decoder(config, rngs=nnx.Rngs(0), implementation="triton")
    graph, state = nnx.split(model)
    caches = [np.zeros(CACHE, jnp.bfloat16)] * 2
    caches += [
        np.zeros((17, *shape), dtype)
        for each in model.paged_spec.states
        for shape, dtype in zip(each.shapes, each.dtypes, strict=True)
    ]
    metadata = decoding(8)

    def step(caches: Any, tokens: Any, state: Any) -> Any:
        return nnx.merge(graph, state)(tokens, tokens, tuple(caches), metadata)

    return step, caches, np.zeros(8, np.int32), state


def test_attention_and_mamba_read_their_shared_product_where_it_is() -> None:
    text = compiled_for_cuda(shared_step, donate=(0,))
    entry = text[text.index("ENTRY") :]
    assert "bf16[8,304]" in entry
    # Queries, keys and values apart.
    assert "bf16[8,128]" not in entry


def odd_layer(is_fp8: bool) -> tuple[Any, ...]:
    """A layer of the delta rule whose products with the input have 198 columns."""
    options: dict[str, Any] = {"dot_general": dot_general, "implementation": "xla", "rngs": nnx.Rngs(0)}
    layer = GatedDeltaNet(3, 256, num_kv_heads=3, key_dim=16, value_dim=16, param_dtype=jnp.bfloat16, **options)
    if is_fp8:
        layer.in_proj = Fp8Linear(*round_to_fp8(layer.in_proj.kernel[...]))  # pyright: ignore[reportAttributeAccessIssue]
    graph, weights = nnx.split(layer)
    return lambda weights, x: nnx.merge(graph, weights)(x), weights, jnp.zeros((4, 16, 256), jnp.bfloat16)


@pytest.mark.parametrize(("is_fp8", "matrix"), [(False, r"bf16\[256,\d+\]"), (True, r"f8e4m3fn\[\d+,256\]")])
def test_weights_with_columns_that_no_product_takes_are_not_copied(is_fp8: bool, matrix: str) -> None:
    text = compiled_for_cuda(odd_layer, is_fp8, options=PRODUCT_OPTIONS)
    assert re.findall(rf"= {matrix}\S* parameter\(", text)
    assert not re.findall(rf"= {matrix}\S* (?:pad|copy|slice|fusion)\(", text)


def reshaped_caches() -> tuple[Any, ...]:
    """Layers of two sizes of heads that share an array, in which one sees blocks of other tokens than the other."""
    spec = {
        "seq_lens": jnp.full(4, 5, jnp.int32),
        "query_start_loc": jnp.arange(5, dtype=jnp.int32),
        "max_query_len": 1,
    }
    options: dict[str, Any] = {"block_tables": jnp.ones((4, 2), jnp.int32), **spec, "implementation": "triton"}

    def step(cache: Any, narrow: Any, wide: Any) -> tuple[Any, Any]:
        outputs = []
        for new, view in ((narrow, CACHE), (wide, (32, 2, 4, 2, 64)), (narrow, CACHE)):
            own = ops.write_kv_cache(new, new, cache.reshape(view), options["seq_lens"], implementation="triton")
            outputs.append(ops.paged_attention(new, own, **options).sum())
            cache = own.reshape(CACHE)
        return cache, sum(outputs)

    return step, np.zeros(CACHE, np.float32), *(np.zeros((4, 2, size), np.float32) for size in (16, 64))


def test_a_cache_that_is_reshaped_between_calls_is_not_copied() -> None:
    text = compiled_for_cuda(reshaped_caches, donate=(0,))
    assert text.count(" custom-call(") >= 6
    assert " copy(" not in text
    assert "copy-start" not in text


def latent_step(is_split: bool) -> tuple[Any, ...]:
    """A decode step of a layer over latents, of DeepSeek's sizes with few heads."""
    latent = LatentConfig(
        kv_lora_rank=512, q_lora_rank=64, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )  # fmt: skip
    config = tiny_config(num_key_value_heads=4, head_dim=64, latent=latent, dtype="bfloat16", num_hidden_layers=1)
    model: Any = Decoder(config, rngs=nnx.Rngs(0), implementation="triton")
    graph, state = nnx.split(with_split_expansions(model) if is_split else model)
    metadata = AttentionMetadata(
        block_tables=jnp.ones((64, 2), jnp.int32), seq_lens=jnp.full(64, 5, jnp.int32), max_query_len=1,
        query_start_loc=jnp.arange(65, dtype=jnp.int32), slot_mapping=jnp.arange(64, 128, dtype=jnp.int32),
    )  # fmt: skip

    def step(caches: Any, tokens: Any, state: Any) -> Any:
        return nnx.merge(graph, state)(tokens, tokens, caches, metadata)

    return step, (jnp.zeros((4, 64, 576), jnp.bfloat16),), np.zeros(64, np.int32), state


def test_the_two_parts_of_an_expansion_of_latents_are_not_copied() -> None:
    parts = r"= \(?bf16\[512,4,128\]\S*,? .*fusion\("
    joined, split = (compiled_for_cuda(latent_step, way, donate=(0,)) for way in (False, True))
    assert re.findall(parts, joined), "XLA reads parts of an array in a product: they need not lie apart"
    assert not re.findall(parts, split)
