"""Multi-head latent attention behind vLLM's contract, on CPU tensors, against the plain form of the paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import reference
from tests.support.backend_cases import refuses
from torch_core import ops
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import AttentionSpec, KVCacheSpec, LatentCacheSpec
from torch_core.launch.run import scratch_of
from torch_core.metadata import SequenceRow, build_common_metadata, metadata_layout
from torch_core.vllm import (
    AttentionCGSupport,
    AttentionScales,
    BuilderConfig,
    ContextParallel,
    DeviceCapability,
    DeviceInfo,
    MLADims,
    StepBuffers,
    TorchAttentionImpl,
    TorchAttentionMetadataBuilder,
    TorchMLAImpl,
    TritonMLABackend,
    TritonMLAImpl,
    TritonMLAMetadataBuilder,
    WorkspaceManager,
    compute_num_kv_splits,
    select_backend,
)

HEADS, BLOCK, NUM_BLOCKS = 3, 4, 40
DIMS = MLADims(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
SPEC = LatentCacheSpec(kv_lora_rank=16, rope_dim=4, block_size=BLOCK, dtype="float32")
SCALE = DIMS.qk_head_dim**-0.5
ONES = AttentionScales.of()
#: Two decodes, a prefill after 9 cached tokens, one after none, one after 3.
ROWS = [
    SequenceRow([5, 6, 7], 8, 1),
    SequenceRow([9], 0, 1),
    SequenceRow([11, 12, 13, 14], 9, 5),
    SequenceRow([15, 16], 0, 7),
    SequenceRow([17, 18], 3, 3),
]


def make_impl(kind: type[TritonMLAImpl] = TritonMLAImpl, *, kv_b_proj: Any = None, **changes: Any) -> TritonMLAImpl:
    generator = torch.Generator().manual_seed(1)
    if kv_b_proj is None:
        kv_b_proj = torch.nn.Linear(16, HEADS * (8 + 6), bias=False).requires_grad_(False)
        kv_b_proj.weight.copy_(torch.randn(kv_b_proj.weight.shape, generator=generator) * 0.3)
    sizes = {name: getattr(DIMS, name) for name in
             ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim")}  # fmt: skip
    arguments: dict[str, Any] = {
        "num_heads": HEADS,
        "head_size": DIMS.cache_head_size,
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "kv_b_proj": kv_b_proj,
        **sizes,
        **changes,
    }
    impl = kind(**arguments)
    impl.process_weights_after_loading(torch.float32)
    return impl


def make_builder(**config: Any) -> TritonMLAMetadataBuilder:
    return TritonMLAMetadataBuilder(
        config.pop("spec", SPEC), ["layer.0"], BuilderConfig(num_heads=HEADS, mla_dims=DIMS, **config), "cpu"
    )


class Step:
    """A batch, a poisoned cache with its contexts written, and the step's queries and latents."""

    def __init__(self, rng: np.random.Generator, rows=ROWS, *, cache_dtype=torch.float32, **build: Any) -> None:
        generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
        self.rows = rows
        self.common = build_common_metadata(rows, block_size=BLOCK, num_blocks=NUM_BLOCKS, **build)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        tokens = self.common.num_tokens
        self.query, self.kv_c, self.k_pe = (
            normal(tokens, HEADS, DIMS.qk_head_dim),
            normal(tokens, 16),
            normal(tokens, 4),
        )
        poison = 0.0 if cache_dtype.itemsize == 1 else float("nan")
        self.cache = torch.full(SPEC.shape(NUM_BLOCKS), poison).to(cache_dtype)
        self.contexts = [normal(row.num_computed_tokens, 20) for row in rows]
        for row, context in zip(rows, self.contexts, strict=True):
            slots = [row.block_ids[t // BLOCK] * BLOCK + t % BLOCK for t in range(len(context))]
            if slots:
                ops.write_latent_cache(context[:, :16], context[:, 16:], self.cache, torch.tensor(slots).int())

    def run(self, impl: TritonMLAImpl, metadata: Any, layer: Any = ONES) -> torch.Tensor:
        output = torch.full((self.common.num_tokens, HEADS * 6), float("nan"))
        return impl.forward(layer, self.query, self.kv_c, self.k_pe, self.cache, metadata, output).view(-1, HEADS, 6)

    def expected(self, impl: TritonMLAImpl, dtype: torch.dtype) -> torch.Tensor:
        """The plain form: all latents expanded to keys and values of every head, as the paper writes it."""
        weight: Any = impl.kv_b_proj.weight
        starts, found = self.common.query_start_loc.tolist(), torch.zeros(self.common.num_tokens, HEADS, 6, dtype=dtype)
        for seq, context in enumerate(self.contexts):
            new = slice(starts[seq], starts[seq + 1])
            latents = torch.cat([context, torch.cat([self.kv_c[new], self.k_pe[new]], -1)]).to(dtype)
            expanded = latents[:, :16] @ weight.to(dtype).T
            k_nope, value = expanded.view(-1, HEADS, 14).split([8, 6], -1)
            key = torch.cat([k_nope, latents[:, None, 16:].expand(-1, HEADS, -1)], -1)
            lens = [torch.tensor([0, n]).int() for n in (new.stop - new.start, len(latents))]
            found[new] = reference.attention(
                self.query[new].to(dtype), key, value, *lens, spec=AttentionSpec(scale=SCALE), compute_dtype=dtype
            )
        return found


@pytest.mark.parametrize("kind", [TritonMLAImpl, TorchMLAImpl])
@pytest.mark.parametrize("workspace_size", [65536, 12])
def test_a_mixed_batch_equals_the_plain_form(kind, workspace_size, rng, within_bound):
    step, impl = Step(rng, num_tokens=20), make_impl(kind)

    found = step.run(impl, make_builder(chunked_prefill_workspace_size=workspace_size).build(0, step.common))

    within_bound(found, step.expected(impl, torch.float32), step.expected(impl, torch.float64))
    assert (found[step.common.num_actual_tokens :] == 0).all()


def test_context_is_expanded_in_parts_that_fit_the_workspace(rng):
    metadata = make_builder(chunked_prefill_workspace_size=12).build(0, Step(rng).common)

    assert metadata.prefill is not None
    chunks = metadata.prefill.context
    assert [chunk.key_start_loc.tolist() for chunk in chunks] == [[0, 4, 4, 7], [0, 4, 4, 4], [0, 1, 1, 1]]
    assert chunks[0].slots.tolist() == [44, 45, 46, 47, 68, 69, 70]
    assert [chunk.max_key_len for chunk in chunks] == [4, 4, 1]


def test_verified_drafts_are_decodes_and_padding_gives_zeros(rng, within_bound):
    rows = [SequenceRow([5, 6, 7], 8, 3), SequenceRow([9, 10], 2, 3)]
    step, impl = Step(rng, rows, num_tokens=9, num_seqs=4), make_impl()

    metadata = make_builder(num_speculative_tokens=2).build(0, step.common)
    found = step.run(impl, metadata)

    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.prefill) == (4, 9, None)
    within_bound(found, step.expected(impl, torch.float32), step.expected(impl, torch.float64))


def test_a_cache_of_bytes_is_read_by_its_name_and_scale(rng):
    step, layer = Step(rng, [row for row in ROWS if row.num_computed_tokens == 0]), AttentionScales.of(k_scale=0.25)
    step.cache = torch.zeros(SPEC.shape(NUM_BLOCKS), dtype=torch.uint8)
    impl = make_impl(kv_cache_dtype="fp8")

    found = step.run(impl, make_builder().build(0, step.common), layer)

    exact = step.expected(impl, torch.float64)
    assert (found - exact).abs().max() < 0.1 * exact.abs().max()
    assert step.cache.view(torch.float8_e4m3fn).float().abs().max() > 4 * step.kv_c.abs().max() / 2


def test_vllms_projection_may_return_a_pair(rng):
    step, plain = Step(rng), make_impl()

    class Pair(torch.nn.Module):
        weight = plain.kv_b_proj.weight

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return plain.kv_b_proj(x), None

    metadata, cache = make_builder().build(0, step.common), step.cache.clone()
    expected, step.cache = step.run(plain, metadata), cache
    assert torch.equal(step.run(make_impl(kv_b_proj=Pair()), metadata), expected)


def test_ranks_that_share_sequences_write_their_tokens_and_merge_their_parts(rng):
    rows = [SequenceRow([5, 6, 7], 8, 1), SequenceRow([9, 10], 5, 1)]
    step, whole = Step(rng, rows), make_impl()
    latents = torch.cat([step.query, step.query], -1)[..., :20].contiguous()
    metadata = make_builder().build(0, step.common)
    new = (step.kv_c, step.k_pe)
    whole.do_kv_cache_update(*new, step.cache, metadata.slot_mapping, "auto", ONES._k_scale)
    expected, expected_lse = whole.forward_mqa(latents, step.cache, metadata, ONES)

    # The same sequences in blocks of as many tokens on each rank.
    common = build_common_metadata(rows, block_size=2 * BLOCK, num_blocks=NUM_BLOCKS)
    parts = []
    for rank in range(2):
        place = ContextParallel(dcp_world_size=2, dcp_rank=rank)
        local = make_builder(context_parallel=place).build(0, common)
        cache = torch.full_like(step.cache, float("nan"))
        for row in rows:
            for index, token in enumerate(range(rank, row.num_computed_tokens, 2)):
                block, source = divmod(index, BLOCK), divmod(token, BLOCK)
                cache[row.block_ids[block[0]], block[1]] = step.cache[row.block_ids[source[0]], source[1]]
        impl = make_impl(context_parallel=place)
        impl.do_kv_cache_update(*new, cache, local.slot_mapping, "auto", ONES._k_scale)
        parts += impl.forward_mqa(latents, cache, local, ONES)
        with pytest.raises(
            Unsupported,
            match="dcp_world_size is 2; this layer holds one part of each sequence: call forward_mqa and merge",
        ):
            step.run(impl, local)

    merged, merged_lse = ops.merge_states(*parts)
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged_lse, expected_lse, rtol=1e-5, atol=1e-6)


def test_what_ranks_derive_lies_where_a_captured_step_reads_it():
    place = ContextParallel(dcp_world_size=2, dcp_rank=1)
    builder = make_builder(context_parallel=place)
    layout = metadata_layout(num_seqs=2, num_tokens=2, max_blocks=3)
    sizes: dict[str, Any] = {
        "block_size": 2 * BLOCK,
        "num_blocks": NUM_BLOCKS,
        "num_seqs": 2,
        "num_tokens": 2,
        "max_blocks": 3,
    }
    buffers = StepBuffers(layout, "cpu")
    empty = build_common_metadata([], max_query_len=1, layout=layout, **sizes)
    with refuses(
        "arrays is None; over 2 ranks a captured step reads lengths and slots that build derives from the batch's. "
        "Give the arrays of StepBuffers here, and to build before each replay."
    ):
        builder.build_for_cudagraph_capture(empty)
    captured = builder.build_for_cudagraph_capture(empty, arrays=buffers.arrays)
    assert captured.decode is not None
    assert captured.decode.seq_lens.tolist() == [0, 0]

    rows = [SequenceRow([5, 6], 9, 1), SequenceRow([7], 4, 1)]
    common = build_common_metadata(rows, layout=layout, buffer=buffers.host_buffer(0), **sizes)
    builder.build(0, common, arrays=buffers.upload(0))

    # Of 10 tokens and of 5, this rank has those at odd positions; the new ones are at 9 and at 4.
    assert captured.decode.seq_lens.tolist() == [5, 2]
    assert captured.slot_mapping.tolist() == [6 * BLOCK, -1]


def test_a_captured_step_is_one_of_empty_decodes(rng):
    rows = [SequenceRow([5, 6, 7], 8, 1), SequenceRow([9], 3, 1)]
    metadata = make_builder().build_for_cudagraph_capture(Step(rng, rows).common)
    assert metadata.slot_mapping.tolist() == [-1, -1]
    assert metadata.decode is not None
    assert metadata.decode.seq_lens.tolist() == [0, 0]
    assert TritonMLAMetadataBuilder.get_cudagraph_support() is AttentionCGSupport.UNIFORM_BATCH
    with refuses("max_query_len is 7; graphs hold decodes of at most 1 tokens. Run prefills without one."):
        make_builder().build_for_cudagraph_capture(Step(rng).common)


def test_a_workspace_is_reserved_for_the_largest_batch_and_then_never_grows():
    workspace = WorkspaceManager("cpu")
    builder = make_builder(workspace=workspace, max_num_seqs=9, max_model_len=4000, num_speculative_tokens=1)
    workspace.lock()

    reserved = workspace.num_bytes
    assert reserved > 0
    assert workspace.is_locked
    for num_seqs in range(1, 10):
        for tokens in (100, 4000):
            workspace.get_simultaneous(*scratch_of(builder._decode_call(num_seqs, tokens), builder.device))
    with refuses(
        f"shapes_and_dtypes need {reserved + 256:,} bytes and the workspace is locked with {reserved:,}; reserve for "
        "the largest batch before locking it."
    ):
        workspace.get_simultaneous(((reserved + 1,), torch.uint8))
    assert workspace.num_bytes == reserved


def test_a_workspace_needs_to_know_the_largest_batch():
    with refuses("max_num_seqs is None and max_model_len 64; a workspace is reserved for them."):
        make_builder(workspace=WorkspaceManager("cpu"), max_model_len=64)


def test_what_a_workspace_gives_does_not_overlap():
    a, b, c = WorkspaceManager("cpu").get_simultaneous(
        ((3,), torch.float32), ((0, 4), torch.int8), ((300,), torch.int8)
    )
    a.fill_(1.0)
    c.fill_(7)
    assert a.tolist() == [1.0] * 3
    assert b.shape == (0, 4)
    assert (c == 7).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"alibi_slopes": [1.0] * 3}, Unsupported, r"alibi_slopes is \[1.0, 1.0, 1.0\]; latent"),
        ({"sliding_window": 9}, Unsupported, "sliding_window is 9; latent attention is served without it: pass None."),
        ({"logits_soft_cap": 5.0}, Unsupported, "logits_soft_cap is 5.0; latent attention is served without"),
        ({"indexer": "x"}, Unsupported, "indexer is 'x'; latent attention is served without"),
        ({"attn_type": "encoder_only"}, Unsupported, "attn_type is 'encoder_only'; latent attention is served in"),
        ({"context_parallel": ContextParallel(pcp_world_size=2)}, Unsupported, "pcp_world_size is 2; prompts that are"),
        ({"kv_cache_dtype": "fp7"}, InvalidInput, "kv_cache_dtype is 'fp7'; it must be one of auto"),
        ({"num_kv_heads": 3}, InvalidInput, "num_kv_heads is 3; by the other sizes it must be 1."),
        ({"head_size": 16}, InvalidInput, "head_size is 16; by the other sizes it must be 20."),
        ({"qk_head_dim": 8}, InvalidInput, "qk_head_dim is 8; by the other sizes it must be 12."),
        ({"kv_b_proj": torch.nn.Linear(16, 9)}, InvalidInput, r"kv_b_proj.weight has shape \(9, 16\); it must be"),
    ],
)  # fmt: skip
def test_a_layer_that_cannot_be_served_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        make_impl(**changes)


def test_a_step_that_does_not_fit_is_refused_and_writes_nothing(rng):
    step, impl = Step(rng, [SequenceRow([9], 0, 1)]), make_impl()
    metadata = make_builder().build(0, step.common)
    out = torch.zeros(1, HEADS * 6)
    arguments = (ONES, step.query, step.kv_c, step.k_pe)
    with pytest.raises(InvalidInput, match=r"kv_cache has shape \(40, 2, 4, 1, 20\); the metadata is for latents"):
        impl.forward(*arguments, torch.zeros(40, 2, 4, 1, 20), metadata, out)
    with pytest.raises(Unsupported, match="output_scale is given"):
        impl.forward(*arguments, step.cache, metadata, out, ONES._k_scale)
    with pytest.raises(InvalidInput, match="output is None; pass a tensor of num_heads"):
        impl.forward(*arguments, step.cache, metadata)
    with pytest.raises(InvalidInput, match=r"^attn_metadata is a dict; TritonMLAImpl reads MLACommonMetadata"):
        impl.forward_mqa(step.query, step.cache, {}, ONES)  # type: ignore[arg-type]
    rows = {"hidden_states_or_cq": step.query, "kv_c_normed": step.kv_c, "k_pe": step.k_pe, "kv_cache": step.cache}
    for name in rows:
        given: Any = {**rows, "output": out, name: [1.0]}
        with pytest.raises(InvalidInput, match=rf"^{name} is a list; it must be a torch tensor\.$"):
            impl.forward(ONES, attn_metadata=metadata, **given)
    with pytest.raises(InvalidInput, match="attn_metadata has no prefill"):
        impl.forward_mha(step.query, step.kv_c, step.k_pe, step.cache, metadata, ONES._k_scale, out)
    with pytest.raises(InvalidInput, match="attn_metadata has no decode"):
        impl.forward_mqa(step.query, step.cache, replace(metadata, decode=None), ONES)
    assert step.cache.isnan().all()
    assert impl.forward(*arguments, step.cache, None, torch.ones(1, HEADS * 6)).eq(0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": (6, 2, 12)}, r"hidden_states_or_cq has shape \(6, 2, 12\); .* \[num_tokens, 3, 12\], or flat."),
        ({"query": (4, 3, 8)}, r"hidden_states_or_cq has shape \(4, 3, 8\); .* \[num_tokens, 3, 12\], or flat."),
        ({"kv_c": (4, 12)}, r"kv_c_normed has shape \(4, 12\); it must be \[num_tokens, 16\]."),
        ({"k_pe": (8, 2)}, r"k_pe has shape \(8, 2\); it must be \[num_tokens, 4\], or with an axis of one head."),
        ({"k_pe": (3, 4)}, "k_pe has 3 rows; the metadata is for 4 tokens."),
        ({"output": (3, 18)}, "output has 3 rows; the metadata is for 4 tokens."),
        ({"output": (6, 12)}, r"output has shape \(6, 12\); it must be \[num_tokens, 3, 6\], or flat."),
    ],
    ids=str,
)  # fmt: skip
def test_heads_and_ropes_that_do_not_fit_are_refused_before_anything_is_written(changes, message, rng):
    """Though they have as many elements as some number of rows that would fit."""
    step, impl = Step(rng, [SequenceRow([9], 0, 4)]), make_impl()
    shapes = {"query": (4, 3, 12), "kv_c": (4, 16), "k_pe": (4, 4), "output": (4, 18), **changes}
    query, kv_c, k_pe, output = (torch.zeros(shape) for shape in shapes.values())
    with pytest.raises(InvalidInput, match=f"^{message}$"):
        impl.forward(ONES, query, kv_c, k_pe, step.cache, make_builder().build(0, step.common), output)
    assert step.cache.isnan().all()


def test_rows_need_not_lie_behind_each_other(rng):
    step, impl = Step(rng), make_impl()
    metadata, cache = make_builder().build(0, step.common), step.cache.clone()
    expected, step.cache = step.run(impl, metadata), cache
    wide = torch.zeros(step.common.num_tokens, 2, HEADS * 12)
    wide[:, 0] = step.query.flatten(1)
    step.query, step.k_pe = wide[:, 0], step.k_pe[:, None]
    assert torch.equal(step.run(impl, metadata), expected)


def test_plain_metadata_and_latent_ones_are_not_taken_for_each_other(rng):
    step = Step(rng, [SequenceRow([9], 0, 1)])
    spec = KVCacheSpec(num_kv_heads=1, head_size=20, block_size=BLOCK, dtype="float32")
    builder = TorchAttentionMetadataBuilder
    plain = builder(spec, ["layer.0"], BuilderConfig(num_heads=HEADS), "cpu").build(0, step.common)
    layer = TorchAttentionImpl(HEADS, 20, SCALE, 1)
    with refuses(
        "attn_metadata is a PagedAttentionMetadata; TritonMLAImpl reads MLACommonMetadata. Build it with the builder "
        "of the layer's own backend."
    ):
        step.run(make_impl(), plain)
    with refuses(
        "attn_metadata is a MLACommonMetadata; TorchAttentionImpl reads PagedAttentionMetadata. Build it with the "
        "builder of the layer's own backend."
    ):
        query = torch.zeros(1, HEADS, 20)
        latent: Any = make_builder().build(0, step.common)
        layer.forward(ONES, query, query[:, :1], query[:, :1], torch.zeros(spec.shape(NUM_BLOCKS)), latent, query)
    with refuses(
        "kv_cache_spec is a LatentCacheSpec; TorchAttentionMetadataBuilder is for layers of keys and values. Latent "
        "ones have TritonMLAMetadataBuilder."
    ):
        builder(SPEC, ["layer.0"], BuilderConfig(num_heads=HEADS), "cpu")
    with refuses("num_heads is 5; it must be a multiple of num_kv_heads, 2."):
        builder(replace(spec, num_kv_heads=2), ["layer.0"], BuilderConfig(num_heads=5), "cpu")
    assert step.cache.isnan().all()


def test_a_builder_refuses_another_cache_and_another_batch(rng):
    common = Step(rng).common
    plain = KVCacheSpec(num_kv_heads=1, head_size=20, block_size=BLOCK, dtype="float32")
    with pytest.raises(
        InvalidInput, match=r"kv_cache_spec is a KVCacheSpec and mla_dims is MLADims.*; latent attention"
    ):
        make_builder(spec=plain)
    with pytest.raises(
        InvalidInput, match="kv_cache_spec has latents of 8 and rotary keys of 4 elements; mla_dims says 16"
    ):
        make_builder(spec=replace(SPEC, kv_lora_rank=8))
    with pytest.raises(InvalidInput, match=r"block_size of the metadata is 4; layer\.0 have 8\. Build it"):
        make_builder(spec=replace(SPEC, block_size=8)).build(0, common)
    with pytest.raises(InvalidInput, match=r"cache_group of the metadata is 0; layer\.0 have 2"):
        make_builder(cache_group=2).build(0, common)
    with pytest.raises(InvalidInput, match="common_prefix_len is 8; latent attention has no cascade"):
        make_builder().build(8, common)
    with pytest.raises(InvalidInput, match="causal is False; latent attention serves"):
        make_builder().build(0, replace(common, causal=False))
    over_ranks = make_builder(context_parallel=ContextParallel(dcp_world_size=2))
    with pytest.raises(InvalidInput, match=r"block_size of the metadata is 4; layer\.0 have 8 \(4 on each"):
        over_ranks.build(0, common)
    with pytest.raises(InvalidInput, match="num_computed_tokens of sequence 2 is 9; a cache that is spread"):
        over_ranks.build(0, build_common_metadata(ROWS, block_size=2 * BLOCK, num_blocks=NUM_BLOCKS))


def test_latent_layers_get_a_backend_of_their_own(make_config):
    config = make_config(use_mla=True, head_size=576, num_kv_heads=1)
    h200 = DeviceInfo(type="cuda", capability=DeviceCapability(9, 0), num_sms=132)
    assert select_backend(config, h200).get_name() == "TRITON_MLA"
    assert select_backend(config, "cpu").get_name() == "TORCH_MLA"
    assert select_backend(make_config(), h200).get_name() == "TRITON_ATTN"
    with pytest.raises(Unsupported, match="TRITON_MLA: it does not serve sinks"):
        select_backend(make_config(use_mla=True, head_size=576, num_kv_heads=1, has_sink=True), h200)


def test_the_cache_of_latents_has_blocks_first():
    assert TritonMLABackend.get_kv_cache_shape(7, 64, 1, 576) == (7, 64, 576)
    assert TritonMLABackend.get_kv_cache_shape(7, 64, 1, 576, "fp8_ds_mla") == (7, 64, 656)
    assert TritonMLABackend.get_kv_cache_block_dim(64, 1, 576) == 0
    assert TritonMLABackend.get_kv_cache_stride_order(True) == (1, 0, 2, 3)
    assert TritonMLABackend.get_builder_cls() is TritonMLAMetadataBuilder


def test_splits_are_a_function_of_sizes_alone():
    assert [compute_num_kv_splits(n, 132) for n in (1, 1024, 1536, 8192, 1 << 20)] == [1, 2, 4, 16, 264]
    with refuses("max_seq_len is 0; it must be an int of at least 1."):
        compute_num_kv_splits(0, 132)
