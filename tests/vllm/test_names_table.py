"""The README's table of vLLM's names: no name is missing, and everything that it points to exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "torch_core" / "vllm" / "README.md"

#: The names of the files, by section of the table.
NAMES = {
    "The contract": (
        "AttentionType",
        "AttentionType.DECODER",
        "AttentionType.ENCODER",
        "AttentionType.ENCODER_ONLY",
        "AttentionType.ENCODER_DECODER",
        "MultipleOf",
        "AttentionBackend",
        "AttentionBackend.accept_output_buffer",
        "AttentionBackend.supported_dtypes",
        "AttentionBackend.supported_kv_cache_dtypes",
        "AttentionBackend.forward_includes_kv_cache_update",
        "AttentionBackend.get_supported_kernel_block_sizes",
        "AttentionBackend.get_name",
        "AttentionBackend.get_impl_cls",
        "AttentionBackend.get_builder_cls",
        "AttentionBackend.get_kv_cache_shape",
        "AttentionBackend.get_kv_cache_block_dim",
        "AttentionBackend.get_kv_cache_stride_order",
        "AttentionBackend.full_cls_name",
        "AttentionBackend.get_supported_head_sizes",
        "AttentionBackend.supports_head_size",
        "AttentionBackend.supports_dtype",
        "AttentionBackend.supports_kv_cache_dtype",
        "AttentionBackend.supports_block_size",
        "AttentionBackend.get_preferred_block_size",
        "AttentionBackend.indexes_kv_by_block_stride",
        "AttentionBackend.is_mla",
        "AttentionBackend.supports_sink",
        "AttentionBackend.supports_alibi_sqrt",
        "AttentionBackend.supports_mm_prefix",
        "AttentionBackend.is_sparse",
        "AttentionBackend.supports_per_head_quant_scales",
        "AttentionBackend.supports_non_causal",
        "AttentionBackend.supports_batch_invariance",
        "AttentionBackend.supports_kv_connector",
        "AttentionBackend.supports_attn_type",
        "AttentionBackend.supports_compute_capability",
        "AttentionBackend.supports_combination",
        "AttentionBackend.validate_configuration",
        "AttentionBackend.get_required_kv_cache_layout",
        "AttentionBackend.is_ssm",
        "AttentionMetadata",
        "CommonAttentionMetadata",
        "CommonAttentionMetadata.query_start_loc",
        "CommonAttentionMetadata.query_start_loc_cpu",
        "CommonAttentionMetadata.seq_lens",
        "CommonAttentionMetadata.seq_lens_cpu",
        "CommonAttentionMetadata.seq_lens_cpu_upper_bound",
        "CommonAttentionMetadata.num_reqs",
        "CommonAttentionMetadata.num_actual_tokens",
        "CommonAttentionMetadata.max_query_len",
        "CommonAttentionMetadata.max_seq_len",
        "CommonAttentionMetadata.block_table_tensor",
        "CommonAttentionMetadata.slot_mapping",
        "CommonAttentionMetadata.causal",
        "CommonAttentionMetadata.logits_indices_padded",
        "CommonAttentionMetadata.num_logits_indices",
        "CommonAttentionMetadata.encoder_seq_lens",
        "CommonAttentionMetadata.encoder_seq_lens_cpu",
        "CommonAttentionMetadata.dcp_local_seq_lens",
        "CommonAttentionMetadata.dcp_local_seq_lens_cpu",
        "CommonAttentionMetadata.positions",
        "CommonAttentionMetadata.is_prefilling",
        "CommonAttentionMetadata.mm_req_doc_ranges",
        "CommonAttentionMetadata.batch_size",
        "CommonAttentionMetadata.naive_query_lens",
        "CommonAttentionMetadata.replace",
        "CommonAttentionMetadata.num_computed_tokens_cpu",
        "CommonAttentionMetadata.compute_num_computed_tokens",
        "CommonAttentionMetadata.unpadded",
        "AttentionCGSupport",
        "AttentionCGSupport.ALWAYS",
        "AttentionCGSupport.UNIFORM_BATCH",
        "AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE",
        "AttentionCGSupport.NEVER",
        "AttentionMetadataBuilder",
        "AttentionMetadataBuilder.reorder_batch_threshold",
        "AttentionMetadataBuilder._init_reorder_batch_threshold",
        "AttentionMetadataBuilder.supports_update_block_table",
        "AttentionMetadataBuilder.get_cudagraph_support",
        "AttentionMetadataBuilder.build",
        "AttentionMetadataBuilder.update_block_table",
        "AttentionMetadataBuilder.build_for_cudagraph_capture",
        "AttentionMetadataBuilder.build_for_drafting",
        "AttentionMetadataBuilder.use_cascade_attention",
        "AttentionLayer",
        "AttentionLayer._q_scale",
        "AttentionLayer._k_scale",
        "AttentionLayer._v_scale",
        "AttentionLayer._q_scale_float",
        "AttentionLayer._k_scale_float",
        "AttentionLayer._v_scale_float",
        "AttentionLayer._prob_scale",
        "AttentionLayer.forward",
        "AttentionImplBase",
        "AttentionImplBase.num_heads",
        "AttentionImplBase.head_size",
        "AttentionImplBase.scale",
        "AttentionImplBase.can_return_lse_for_decode",
        "AttentionImplBase.need_to_return_lse_for_decode",
        "AttentionImplBase.supports_pcp",
        "AttentionImplBase.supports_mtp_with_cp_non_trivial_interleave_size",
        "AttentionImplBase.supports_quant_query_input",
        "AttentionImplBase.dcp_world_size",
        "AttentionImplBase.dcp_rank",
        "AttentionImplBase.pcp_world_size",
        "AttentionImplBase.pcp_rank",
        "AttentionImplBase.total_cp_world_size",
        "AttentionImplBase.total_cp_rank",
        "AttentionImplBase.process_weights_after_loading",
        "AttentionImpl",
        "AttentionImpl.forward",
        "AttentionImpl.kv_cache_dtype",
        "AttentionImpl.kv_quant_mode",
        "AttentionImpl.fused_output_quant_supported",
        "AttentionImpl.fused_rope_kvcache_supported",
        "AttentionImpl.fused_qk_norm_rope_kvcache_supported",
        "AttentionImpl.do_rope_and_kv_cache_update",
        "AttentionImpl.do_qk_norm_rope_kvcache_update",
        "MLAAttentionImpl",
        "MLAAttentionImpl.forward_mha",
        "MLAAttentionImpl.forward_mqa",
        "MLAAttentionImpl.do_kv_cache_update",
        "MLAAttentionImpl.fused_output_quant_supported",
        "SparseMLAAttentionImpl",
        "is_quantized_kv_cache",
        "subclass_attention_backend",
        "subclass_attention_backend_with_overrides",
        "M",
        "T",
        "MultipleOf.base",
        "MultipleOf.__init__",
        "CommonAttentionMetadata.__init__",
        "CommonAttentionMetadata._seq_lens_cpu",
        "CommonAttentionMetadata._num_computed_tokens_cpu",
        "CommonAttentionMetadata._num_computed_tokens_cache",
        "AttentionMetadataBuilder.__init__",
        "AttentionMetadataBuilder._cudagraph_support",
        "AttentionMetadataBuilder.kv_cache_spec",
        "AttentionMetadataBuilder.layer_names",
        "AttentionMetadataBuilder.vllm_config",
        "AttentionMetadataBuilder.device",
        "AttentionImpl.__new__",
        "AttentionImpl.__init__",
        "AttentionImpl.process_weights_after_loading",
        "AttentionImpl.num_heads",
        "AttentionImpl.head_size",
        "AttentionImpl.scale",
        "AttentionImpl.can_return_lse_for_decode",
        "AttentionImpl.need_to_return_lse_for_decode",
        "AttentionImpl.supports_pcp",
        "AttentionImpl.supports_mtp_with_cp_non_trivial_interleave_size",
        "AttentionImpl.supports_quant_query_input",
        "AttentionImpl.dcp_world_size",
        "AttentionImpl.dcp_rank",
        "AttentionImpl.pcp_world_size",
        "AttentionImpl.pcp_rank",
        "AttentionImpl.total_cp_world_size",
        "AttentionImpl.total_cp_rank",
        "MLAAttentionImpl.__init__",
        "MLAAttentionImpl.forward",
    ),
    "Batch helpers": (
        "KVCacheLayoutType",
        "PAD_SLOT_ID",
        "is_valid_kv_cache_layout",
        "get_kv_cache_layout",
        "set_kv_cache_layout",
        "make_local_attention_virtual_batches",
        "make_kv_sharing_fast_prefill_common_attn_metadata",
        "split_decodes_and_prefills",
        "split_prefill_chunks",
        "reorder_batch_to_split_decodes_and_prefills",
        "get_dcp_local_seq_lens",
        "compute_causal_conv1d_metadata",
        "mamba_get_block_table_tensor",
    ),
    "The Triton backend": (
        "TritonAttentionBackend",
        "TritonAttentionImpl",
        "TritonAttentionImpl.forward",
        "TritonAttentionImpl.fused_output_quant_supported",
        "TritonAttentionImpl.do_kv_cache_update",
        "TritonAttentionMetadataBuilder",
        "TritonAttentionMetadata",
        "TritonAttentionMetadata.num_actual_tokens",
        "TritonAttentionMetadata.max_query_len",
        "TritonAttentionMetadata.query_start_loc",
        "TritonAttentionMetadata.max_seq_len",
        "TritonAttentionMetadata.seq_lens",
        "TritonAttentionMetadata.block_table",
        "TritonAttentionMetadata.slot_mapping",
        "TritonAttentionMetadata.use_cascade",
        "TritonAttentionMetadata.common_prefix_len",
        "TritonAttentionMetadata.cu_prefix_query_lens",
        "TritonAttentionMetadata.prefix_kv_lens",
        "TritonAttentionMetadata.suffix_kv_lens",
        "TritonAttentionMetadata.scheduler_metadata",
        "TritonAttentionMetadata.prefix_scheduler_metadata",
        "TritonAttentionMetadata.seq_threshold_3D",
        "TritonAttentionMetadata.num_par_softmax_segments",
        "TritonAttentionMetadata.softmax_segm_output",
        "TritonAttentionMetadata.softmax_segm_max",
        "TritonAttentionMetadata.softmax_segm_expsum",
        "logger",
        "TritonAttentionBackend.accept_output_buffer",
        "TritonAttentionBackend.get_name",
        "TritonAttentionBackend.get_impl_cls",
        "TritonAttentionBackend.get_builder_cls",
        "TritonAttentionBackend.get_metadata_cls",
        "TritonAttentionBackend.get_supported_dtypes",
        "TritonAttentionBackend.get_kv_cache_shape",
        "TritonAttentionBackend.validate_head_size",
        "TritonAttentionBackend.use_cascade_attention",
        "TritonAttentionImpl.__init__",
        "TritonAttentionImpl.num_heads",
        "TritonAttentionImpl.head_size",
        "TritonAttentionImpl.scale",
        "TritonAttentionImpl.num_kv_heads",
        "TritonAttentionImpl.alibi_slopes",
        "TritonAttentionImpl.kv_cache_dtype",
        "TritonAttentionImpl.kv_sharing_target_layer_name",
        "TritonAttentionImpl.sinks",
        "TritonAttentionImpl.num_queries_per_kv",
        "TritonAttentionImpl.sliding_window",
        "TritonAttentionImpl.logits_soft_cap",
        "TritonAttentionImpl.fp8_dtype",
        "TritonAttentionMetadata.__init__",
        "TritonAttentionMetadataBuilder.__init__",
        "TritonAttentionMetadataBuilder.build",
        "TritonAttentionMetadataBuilder.build_for_cudagraph_capture",
        "TritonAttentionMetadataBuilder.cudagraph_support",
        "TritonAttentionMetadataBuilder.block_size",
        "TritonAttentionMetadataBuilder.headdim",
        "TritonAttentionMetadataBuilder.num_heads_kv",
        "TritonAttentionMetadataBuilder.num_heads_q",
    ),
    "Older helpers": (
        "is_block_tables_empty",
        "compute_slot_mapping_start_idx",
        "compute_slot_mapping",
        "CommonMetadataBuilder",
        "CommonMetadataBuilder.prepare",
        "CommonMetadataBuilder.build",
        "CommonAttentionState",
        "CommonAttentionState.graph_capture",
        "CommonAttentionState.graph_clone",
        "CommonAttentionState.graph_capture_get_metadata_for_batch",
        "CommonAttentionState.get_graph_input_buffers",
        "CommonAttentionState.prepare_graph_input_buffers",
        "CommonAttentionState.begin_forward",
        "is_all_encoder_attn_metadata_set",
        "is_all_cross_attn_metadata_set",
        "get_seq_len_block_table_args",
        "get_num_prefill_decode_query_kv_tokens",
        "MLADims",
        "get_mla_dims",
        "get_flash_attn_version",
        "STR_NOT_IMPL_ENC_DEC_ROCM_HIP",
        "PAD_SLOT_ID",
        "TAttentionMetadata",
        "logger",
        "_COMPUTE_SLOT_MAPPING_NUMPY_NUMEL",
        "_compute_slot_mapping_numpy",
        "_compute_slot_mapping_python",
        "CommonMetadataBuilder.__init__",
        "CommonMetadataBuilder._metadata_cls",
        "CommonMetadataBuilder._add_seq_group",
        "CommonMetadataBuilder.input_builder",
        "CommonMetadataBuilder.runner",
        "CommonMetadataBuilder.sliding_window",
        "CommonMetadataBuilder.block_size",
        "CommonAttentionState.__init__",
        "CommonAttentionState.runner",
        "CommonAttentionState._is_graph_capturing",
        "CommonAttentionState._update_captured_metadata_for_enc_dec_model",
        "CommonAttentionState._add_additional_input_buffers_for_enc_dec_model",
        "CommonAttentionState._prepare_input_buffers_for_enc_dec_model",
        "MLADims.__init__",
        "MLADims.q_lora_rank",
        "MLADims.kv_lora_rank",
        "MLADims.qk_nope_head_dim",
        "MLADims.qk_rope_head_dim",
        "MLADims.v_head_dim",
    ),
    "The prefill kernel": (
        "context_attention_fwd",
        "context_attention_fwd.is_causal",
        "context_attention_fwd.sliding_window_q",
        "context_attention_fwd.sliding_window_k",
        "context_attention_fwd.max_input_len",
        "get_block_size",
        "_fwd_kernel",
    ),
    "The MLA builder": (
        "TritonMLAMetadataBuilder",
        "TritonMLAMetadataBuilder.__init__",
        "TritonMLAMetadataBuilder._cudagraph_support",
        "TritonMLAMetadataBuilder._reserve_attn_logits_workspace",
        "MLACommonMetadataBuilder",
        "MLACommonMetadata",
        "_compute_num_kv_splits",
        "num_compute_units",
        "current_workspace_manager",
        "is_workspace_manager_initialized",
        "get_simultaneous",
    ),
}


class Row(NamedTuple):
    section: str
    name: str
    here: str
    test: str
    difference: str


def read_table() -> list[Row]:
    rows, section = [], ""
    for line in README.read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            section = line.removeprefix("### ").partition(":")[0]
        elif line.startswith("## "):
            section = ""
        elif line.startswith("| `") and section:
            rows.append(Row(section, *(cell.strip().strip("`") for cell in line.strip("|").split(" | "))))
    return rows


TABLE = read_table()
PRESENT = [row for row in TABLE if row.here != "-"]


@pytest.mark.parametrize("section", NAMES)
def test_every_name_has_exactly_one_row(section):
    assert [row.name for row in TABLE if row.section == section] == list(NAMES[section])


def test_the_table_has_no_other_sections():
    assert {row.section for row in TABLE} == set(NAMES)


def test_everything_that_a_row_points_to_exists():
    assert [row.here for row in PRESENT if not exists(row.here)] == []


def test_the_test_of_every_row_exists():
    missing = [
        row.test for row in PRESENT if row.test.partition("::")[2] not in functions_of(row.test.partition("::")[0])
    ]

    assert missing == []


def test_the_table_checks_can_fail():
    assert not exists("torch_core.vllm.AttentionBackend.get_nothing")
    assert "test_nothing" not in functions_of("vllm/test_contract.py")


class Behaviour(NamedTuple):
    file: str
    behaviour: str
    test: str
    difference: str


def read_behaviours() -> list[Behaviour]:
    table = README.read_text(encoding="utf-8").partition(
        "| file | behaviour | test | difference |\n|---|---|---|---|\n"
    )
    lines = table[2].splitlines()
    return [Behaviour(*(cell.strip().strip("`") for cell in line.strip("|").split(" | "))) for line in lines]


def test_every_file_has_its_behaviours():
    files = {row.file for row in read_behaviours()}

    assert files == {"triton_attn", "backend", "triton_prefill_attention", "utils", "triton_mla"}


def test_a_behaviour_has_a_test_or_a_reason():
    missing = [
        row.behaviour
        for row in read_behaviours()
        if (row.test == "-" and len(row.difference) < 5)
        or (row.test != "-" and row.test.partition("::")[2] not in functions_of(row.test.partition("::")[0]))
    ]

    assert missing == []


def exists(path: str) -> bool:
    owner, attribute = resolve_owner(path)
    sources = [inspect.getsource(cls) for cls in getattr(owner, "__mro__", ()) if cls.__module__.startswith("torch_")]
    if any(re.search(rf"self\.{attribute}\b.* = ", source) for source in sources):
        return True
    annotations = [name for cls in getattr(owner, "__mro__", ()) for name in vars(cls).get("__annotations__", {})]
    return hasattr(owner, attribute) or attribute in annotations


def resolve_owner(path: str) -> tuple[object, str]:
    *parts, attribute = path.split(".")
    owner = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=2):
        if not hasattr(owner, part):
            importlib.import_module(".".join(parts[:index]))
        owner = getattr(owner, part)
    return owner, attribute


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_a_row_without_a_counterpart_says_why():
    assert all(row.test == "-" and len(row.difference) > 5 for row in TABLE if row.here == "-")


def test_the_examples_run():
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    scope: dict = {}

    for example in examples:
        exec(compile(example, str(README), "exec"), scope)

    assert scope["output"].shape == (3, 4, 32)
    assert scope["latent_output"].shape == (3, 16 * 128)
