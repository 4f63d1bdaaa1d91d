"""The parts of the contract that need no attention: names, shapes, thresholds, subclasses, sizes."""

from __future__ import annotations

import re
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torch_core import vllm
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import KVCacheSpec
from torch_core.vllm import (
    CACHE_DTYPES,
    FP8_STATIC_TENSOR,
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionScales,
    AttentionType,
    BuilderConfig,
    ContextParallel,
    DeviceCapability,
    DeviceInfo,
    MLAAttentionImpl,
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    MLADims,
    MultipleOf,
    PagedAttentionMetadata,
    QuantKey,
    TorchAttentionBackend,
    TorchAttentionImpl,
    TorchAttentionMetadataBuilder,
    TorchMLABackend,
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
    get_mla_dims,
    is_quantized_kv_cache,
    is_valid_kv_cache_layout,
    subclass_attention_backend,
    subclass_attention_backend_with_overrides,
)

BACKENDS = [TritonAttentionBackend, TorchAttentionBackend]
SPEC = KVCacheSpec(num_kv_heads=2, head_size=32, block_size=4, dtype="float32")


def refuses(message: str, error: type[Exception] = InvalidInput):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def test_attention_types_compare_equal_to_their_names():
    assert [kind.value for kind in AttentionType] == ["decoder", "encoder", "encoder_only", "encoder_decoder"]
    assert AttentionType.ENCODER_ONLY == "encoder_only"


def test_graph_support_levels_have_vllms_values():
    assert {level.name: level.value for level in AttentionCGSupport} == {
        "ALWAYS": 3,
        "UNIFORM_BATCH": 2,
        "UNIFORM_SINGLE_TOKEN_DECODE": 1,
        "NEVER": 0,
    }
    assert TritonAttentionMetadataBuilder.get_cudagraph_support() is AttentionCGSupport.ALWAYS
    assert TorchAttentionMetadataBuilder.get_cudagraph_support() is AttentionCGSupport.NEVER
    assert AttentionMetadataBuilder.get_cudagraph_support() is AttentionCGSupport.NEVER


def test_multiples_contain_their_positive_multiples():
    assert [size in MultipleOf(16) for size in (0, 8, 16, 24, 32)] == [False, False, True, False, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_cache_has_blocks_first_and_keys_and_values_second(backend):
    assert backend.get_kv_cache_shape(10, 16, 8, 128) == (10, 2, 16, 8, 128)
    assert backend.get_kv_cache_block_dim(16, 8, 128) == 0
    assert backend.get_kv_cache_stride_order() == (0, 1, 2, 3, 4)
    assert backend.get_kv_cache_stride_order(include_num_layers_dimension=True) == (1, 0, 2, 3, 4, 5)
    assert backend.indexes_kv_by_block_stride()
    assert backend.get_required_kv_cache_layout() is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_size_out_of_range_is_refused(backend):
    with refuses("block_size is 512; it must be from 1 to 256."):
        backend.get_kv_cache_shape(10, 512, 8, 128)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_names_its_classes(backend):
    assert issubclass(backend.get_impl_cls(), AttentionImpl)
    assert issubclass(backend.get_builder_cls(), AttentionMetadataBuilder)
    assert backend.full_cls_name() == (backend.__module__, backend.__name__)
    assert backend.accept_output_buffer
    assert backend.forward_includes_kv_cache_update
    assert not backend.is_ssm()
    assert backend.get_supported_head_sizes()[-1] == 512
    assert set(backend.get_supported_dtypes()) == {torch.float16, torch.bfloat16, torch.float32}
    assert backend.get_metadata_cls() is PagedAttentionMetadata


def test_block_sizes_are_served_or_replaced():
    backend = subclass_attention_backend_with_overrides(
        "Sixteens",
        TorchAttentionBackend,
        {"get_supported_kernel_block_sizes": staticmethod(lambda: [MultipleOf(16), 8])},
    )

    assert [backend.supports_block_size(size) for size in (None, 8, 16, 24, 256, 512)] == [
        True, True, True, False, True, False,
    ]  # fmt: skip
    assert backend.get_preferred_block_size(32) == 32
    assert backend.get_preferred_block_size(24) == 8


def test_a_subclass_builds_with_the_given_class():
    class Builder(TorchAttentionMetadataBuilder):
        pass

    backend = subclass_attention_backend("Mine", TorchAttentionBackend, Builder)

    assert backend.__name__ == "MineTorchAttentionBackend"
    assert backend.get_builder_cls() is Builder
    assert backend.get_impl_cls() is TorchAttentionImpl


@pytest.mark.parametrize("backend", [*BACKENDS, TorchMLABackend])
def test_the_cache_of_a_dtype_that_is_not_served_has_no_shape(backend):
    with pytest.raises(InvalidInput, match=r"cache_dtype_str is 'fp7'; .* serves auto, ") as error:
        backend.get_kv_cache_shape(10, 16, 8, 128, "fp7")
    assert error.value.argument == "cache_dtype_str"


def test_contracts_are_generic_over_the_metadata_as_vllms_are():
    class Impl(AttentionImpl[PagedAttentionMetadata]):
        pass

    class Latent(MLAAttentionImpl[MLACommonMetadata[MLACommonDecodeMetadata]]):
        pass

    class Builder(AttentionMetadataBuilder[PagedAttentionMetadata]):
        pass

    class LatentBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
        pass

    assert not any(cls.__parameters__ for cls in (Impl, Latent, Builder, LatentBuilder))  # type: ignore[attr-defined]


def test_a_star_import_brings_no_module():
    assert not any(isinstance(getattr(vllm, name), ModuleType) for name in vllm.__all__)


def test_abstract_classes_cannot_be_made():
    abstract: tuple[Any, ...] = (AttentionImpl, MLAAttentionImpl, AttentionMetadataBuilder)
    for cls in abstract:
        with pytest.raises(TypeError, match="abstract"):
            cls()


class Bare(AttentionBackend):
    """A backend that overrides only what it must."""

    @staticmethod
    def get_name():
        return "BARE"

    get_impl_cls = staticmethod(TorchAttentionBackend.get_impl_cls)
    get_builder_cls = staticmethod(TorchAttentionBackend.get_builder_cls)


def test_a_bare_backend_serves_ordinary_decoder_layers_and_nothing_more(make_config, refusals):
    device = DeviceInfo(type="cuda", capability=DeviceCapability(9, 0), num_sms=132)

    assert refusals(Bare, make_config(), device) == []
    assert Bare.get_supported_kernel_block_sizes() == [MultipleOf(1)]
    assert [kind for kind in AttentionType if Bare.supports_attn_type(kind)] == ["decoder"]
    assert not Bare.is_mla()
    assert not Bare.is_sparse()
    assert refusals(
        Bare, make_config(has_sink=True, use_mm_prefix=True, use_alibi_sqrt=True, use_non_causal=True,
                    use_batch_invariant=True, use_per_head_quant_scales=True, dtype=torch.float32), device,
    ) == [
        "dtype is float32; it serves float16, bfloat16",
        "it does not serve sinks (has_sink)",
        "it does not serve bidirectional spans (use_mm_prefix)",
        "it does not serve square-root ALiBi (use_alibi_sqrt)",
        "it has one cache scale for all heads (use_per_head_quant_scales)",
        "its decoder attention is causal (use_non_causal)",
        "its results depend on the batch (use_batch_invariant)",
    ]  # fmt: skip
    chosen = subclass_attention_backend_with_overrides("Few", Bare, {"supported_head_sizes": (64, 128)})
    assert refusals(chosen, make_config(head_size=80), device) == ["head_size is 80; it serves 64, 128"]


def test_the_torch_backend_serves_every_option_but_batch_invariance(make_config, refusals):
    config = make_config(has_sink=True, use_mm_prefix=True, use_alibi_sqrt=True, use_non_causal=True)

    assert refusals(TorchAttentionBackend, config, DeviceInfo(type="cpu")) == []


def test_a_bare_builder_captures_and_drafts_like_any_step():
    class Builder(AttentionMetadataBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False, *, arrays=None):
            return common_prefix_len, common_attn_metadata, fast_build, arrays

    builder: Any = Builder(SPEC, [], BuilderConfig(num_heads=4), "cpu")

    assert builder.build_for_cudagraph_capture("batch", arrays={}) == (0, "batch", False, {})
    assert builder.build_for_drafting("batch", 2) == (0, "batch", True, None)


def test_a_builder_that_was_written_for_vllm_captures_and_drafts():
    class Builder(AttentionMetadataBuilder):
        _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

        def build(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, common_prefix_len, common_attn_metadata, fast_build=False
        ):
            return common_prefix_len, common_attn_metadata, fast_build

    config = BuilderConfig(num_heads=4, num_speculative_tokens=2)
    builder: Any = Builder(SPEC, ["layer.0"], config, torch.device("cpu"))

    assert Builder.get_cudagraph_support(vllm_config=config, kv_cache_spec=SPEC) is AttentionCGSupport.UNIFORM_BATCH
    assert (builder.kv_cache_spec, builder.layer_names, builder.vllm_config) == (SPEC, ("layer.0",), config)
    assert builder.reorder_batch_threshold == 3
    assert builder.build_for_cudagraph_capture("batch") == (0, "batch", False)
    assert builder.build_for_drafting(common_attn_metadata="batch", draft_index=2) == (0, "batch", True)
    assert builder.use_cascade_attention(8192, np.ones(64), 32, 8, False, False, False, 132, 1) is False


def make_builder(**config):
    return TritonAttentionMetadataBuilder(SPEC, ["layer.0"], BuilderConfig(num_heads=4, **config), "cpu")


def test_a_verified_draft_counts_as_a_decode():
    builder = make_builder(num_speculative_tokens=3)
    builder._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
    assert builder.reorder_batch_threshold == 4

    builder = make_builder(num_speculative_tokens=3, parallel_drafting=True)
    builder._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
    assert builder.reorder_batch_threshold == 7

    builder._init_reorder_batch_threshold(16, supports_spec_as_decode=False)
    assert builder.reorder_batch_threshold == 16


def test_a_builder_that_takes_any_order_has_no_longest_decode():
    builder = make_builder(num_speculative_tokens=3)
    builder._init_reorder_batch_threshold(None, True, False)
    assert builder.reorder_batch_threshold is None


def test_ranks_that_share_sequences_decode_single_tokens():
    builder = make_builder(num_speculative_tokens=3, context_parallel=ContextParallel(dcp_world_size=2))
    builder._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
    assert builder.reorder_batch_threshold == 1

    builder._init_reorder_batch_threshold(1, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
    assert builder.reorder_batch_threshold == 4


def test_a_layer_is_alone_unless_it_is_given_a_place():
    class Layer(AttentionImpl):
        def __init__(self):
            self.num_heads = 1

        def forward(self, *args, **options):
            raise NotImplementedError

    assert Layer().context_parallel == ContextParallel()
    assert not Layer().need_to_return_lse_for_decode
    assert not Layer().supports_mtp_with_cp_non_trivial_interleave_size
    Layer.context_parallel = ContextParallel(dcp_world_size=2)
    assert not Layer().need_to_return_lse_for_decode
    Layer.can_return_lse_for_decode = True
    assert Layer().need_to_return_lse_for_decode


def test_ranks_that_share_sequences_capture_decodes_alone():
    place = ContextParallel(dcp_world_size=2)
    config = BuilderConfig(num_heads=4, context_parallel=place)
    assert TorchAttentionMetadataBuilder.get_cudagraph_support(config, SPEC) is AttentionCGSupport.NEVER
    assert TritonAttentionMetadataBuilder.get_cudagraph_support(config, SPEC) is (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    assert TritonAttentionMetadataBuilder.get_cudagraph_support(BuilderConfig(num_heads=4), SPEC) is (
        AttentionCGSupport.ALWAYS
    )


def test_prompts_over_ranks_without_a_group_are_refused():
    place = ContextParallel(pcp_world_size=2)
    message = (
        "pcp_world_size is 2 and dcp_world_size 1; prompts are split over ranks with a pcp_group, and not over dcp "
        "ranks as well: use 1 for one of them."
    )
    with refuses(message, Unsupported):
        make_builder(context_parallel=place)
    with refuses(message, Unsupported):
        TorchAttentionImpl(4, 32, 1.0, context_parallel=place)


def test_the_paged_builders_take_any_order():
    assert make_builder().reorder_batch_threshold is None


def test_ranks_are_numbered_over_both_kinds():
    place = ContextParallel(dcp_world_size=4, dcp_rank=3, pcp_world_size=2, pcp_rank=1)

    assert (place.total_cp_world_size, place.total_cp_rank) == (8, 7)
    with refuses("dcp_rank is 2 of dcp_world_size 2; it must be from 0 to size - 1."):
        ContextParallel(dcp_world_size=2, dcp_rank=2)
    with refuses("interleave_size is 0; it must be an int of at least 1."):
        ContextParallel(interleave_size=0)


def test_builder_configurations_are_checked():
    with refuses("sliding_window is 0; it must be an int of at least 1."):
        BuilderConfig(num_heads=4, sliding_window=0)
    with refuses("num_speculative_tokens is -1; it must be an int of at least 0."):
        BuilderConfig(num_heads=4, num_speculative_tokens=-1)


def test_a_builder_without_updates_says_so():
    class Plain(TritonAttentionMetadataBuilder):
        update_block_table = AttentionMetadataBuilder.update_block_table

    builder: Any = Plain(SPEC, [], BuilderConfig(num_heads=4), "cpu")
    with refuses("update_block_table is not served by Plain; call build for each cache group.", Unsupported):
        builder.update_block_table(None, None, None)


def test_cascade_is_off_by_default_and_on_the_cpu():
    assert not AttentionMetadataBuilder.use_cascade_attention(make_builder(), 8192, np.ones(64), num_sms=132)
    builder = TorchAttentionMetadataBuilder(SPEC, [], BuilderConfig(num_heads=4), "cpu")
    assert not builder.use_cascade_attention(8192, np.ones(64), num_sms=0)


def test_cascade_follows_the_layers_masks():
    spec = KVCacheSpec(num_kv_heads=8, head_size=128, block_size=16, dtype="bfloat16")

    def choice(**config):
        builder = TritonAttentionMetadataBuilder(spec, [], BuilderConfig(num_heads=32, **config), "cpu")
        return builder.use_cascade_attention(8192, np.ones(64), num_sms=132)

    assert choice()
    assert not choice(use_alibi=True)
    assert not choice(sliding_window=1024)
    assert not choice(attention_chunk=8192)
    assert not choice(context_parallel=ContextParallel(dcp_world_size=2))
    assert not choice(batch_invariant=True)


def test_cascade_follows_what_vllm_asks_with():
    spec = KVCacheSpec(num_kv_heads=8, head_size=128, block_size=16, dtype="bfloat16")
    builder = TritonAttentionMetadataBuilder(spec, [], BuilderConfig(num_heads=32), "cpu")
    names = ("num_query_heads", "num_kv_heads", "use_alibi", "use_sliding_window", "use_local_attention", "num_sms",
             "dcp_world_size")  # fmt: skip
    asked: dict[str, Any] = dict(zip(names, (32, 8, False, False, False, 132, 1), strict=True))

    assert builder.use_cascade_attention(8192, np.ones(64), *asked.values())
    for name, value in (("use_alibi", True), ("use_sliding_window", True), ("use_local_attention", True),
                        ("num_sms", 0), ("dcp_world_size", 2)):  # fmt: skip
        assert not builder.use_cascade_attention(8192, np.ones(64), **{**asked, name: value}), name
    with refuses("num_query_heads is 30; it must be a multiple of num_kv_heads, 8."):
        builder.use_cascade_attention(8192, np.ones(64), **{**asked, "num_query_heads": 30})


@pytest.mark.parametrize("name", ["int8_per_token_head", "fp8_per_token_head", "nvfp4"])
def test_a_cache_dtype_that_is_not_served_counts_as_quantised(name):
    # Code that asks before it reads raw bytes must not take them for real values.
    assert is_quantized_kv_cache(name)


def test_cache_dtypes_have_names():
    assert [is_quantized_kv_cache(name) for name in ("auto", "bfloat16", "fp8", "int8")] == [False, False, True, True]
    assert CACHE_DTYPES["auto"] is None
    assert CACHE_DTYPES["fp8_e5m2"] is torch.float8_e5m2


def test_layouts_have_names():
    assert [is_valid_kv_cache_layout(name) for name in ("NHD", "HND", "HDN")] == [True, True, False]


def test_one_static_fp8_scale_can_be_fused_into_the_output():
    impl: Any = TritonAttentionImpl(4, 32, 0.5)

    assert impl.fused_output_quant_supported(FP8_STATIC_TENSOR)
    assert not impl.fused_output_quant_supported(QuantKey(dtype=torch.float8_e4m3fn, static=False, group="token"))
    assert not AttentionImpl.fused_output_quant_supported(impl, FP8_STATIC_TENSOR)
    assert not MLAAttentionImpl.fused_output_quant_supported(impl, FP8_STATIC_TENSOR)


def test_nothing_is_prepared_from_weights_by_default():
    impl: Any = TorchAttentionImpl(4, 32, 0.5)
    assert impl.process_weights_after_loading(torch.bfloat16) is None
    assert not AttentionImpl.fused_output_quant_supported(impl, FP8_STATIC_TENSOR)


def test_scales_come_as_tensors_and_numbers():
    layer = AttentionScales.of(q_scale=2.0, k_scale=3.0, v_scale=4.0)

    assert [layer._q_scale.item(), layer._k_scale.item(), layer._v_scale.item()] == [2.0, 3.0, 4.0]
    assert (layer._q_scale_float, layer._k_scale_float, layer._v_scale_float) == (2.0, 3.0, 4.0)


def test_latent_attention_sizes_come_from_the_model_configuration():
    config = SimpleNamespace(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)

    dims = get_mla_dims(config)

    assert dims == MLADims(
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    assert (dims.qk_head_dim, dims.cache_head_size) == (192, 576)
    config.q_lora_rank = 1536
    assert get_mla_dims(SimpleNamespace(hf_text_config=config)).q_lora_rank == 1536


@pytest.mark.parametrize("value", [None, 0, "512", True])
def test_missing_latent_sizes_are_refused(value):
    config = SimpleNamespace(kv_lora_rank=value, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    with refuses(f"kv_lora_rank of the model configuration is {value!r}; it must be an int of at least 1."):
        get_mla_dims(config)


def test_a_layer_keeps_what_it_was_made_with():
    sinks = torch.zeros(4)
    layer = TritonAttentionImpl(4, 32, 1, 2, [0.5, 0.25, 0.125, 1.0], 8, "fp8", 3.0, "decoder", "layer.0", sinks)
    bare = TritonAttentionImpl(4, 32, 0.5)

    assert (layer.num_heads, layer.head_size, layer.num_kv_heads, layer.kv_cache_dtype) == (4, 32, 2, "fp8")
    assert isinstance(layer.scale, float)
    assert layer.alibi_slopes is not None
    assert layer.alibi_slopes.dtype == torch.float32
    assert (layer.spec.window_left, layer.spec.logits_soft_cap) == (7, 3.0)
    assert layer.kv_sharing_target_layer_name == "layer.0"
    assert layer.sinks is sinks
    assert (bare.num_kv_heads, bare.alibi_slopes, bare.sinks, bare.kv_cache_dtype) == (4, None, None, "auto")
    assert (bare.spec.window_left, bare.spec.logits_soft_cap) == (None, None)
