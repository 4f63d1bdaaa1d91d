"""Which backend serves which layer, and the reasons that are given when none does."""

from __future__ import annotations

import re

import pytest
import torch

from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.vllm import (
    AttentionSelectorConfig,
    AttentionType,
    DeviceCapability,
    DeviceInfo,
    MultipleOf,
    TorchAttentionBackend,
    TritonAttentionBackend,
    get_backend,
    select_backend,
    subclass_attention_backend_with_overrides,
)

H200 = DeviceInfo(type="cuda", capability=DeviceCapability(9, 0), num_sms=132)
A100 = DeviceInfo(type="cuda", capability=DeviceCapability(8, 0), num_sms=108)
T4 = DeviceInfo(type="cuda", capability=DeviceCapability(7, 5), num_sms=40)
CPU = DeviceInfo(type="cpu")
TRITON, TORCH = TritonAttentionBackend, TorchAttentionBackend

EVERY_CACHE = "auto, float32, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2, int8"
NO_MLA = "it does not compute multi-head latent attention (use_mla)"
NO_SPARSE = "it computes dense attention only (use_sparse)"
ONE_SCALE = "it has one cache scale for all heads (use_per_head_quant_scales)"


def limited(**overrides):
    """The torch backend with fewer abilities."""
    return subclass_attention_backend_with_overrides("Limited", TorchAttentionBackend, overrides)


def never(cls) -> bool:
    return False


NO = classmethod(never)

REFUSED = {
    "triton on the cpu": (TRITON, CPU, {}, ["it runs on cuda and the device is cpu"]),
    "torch on cuda": (TORCH, H200, {}, ["it runs on cpu and the device is cuda"]),
    "an old device": (TRITON, T4, {}, ["the device has compute capability 7.5; it needs 8.0"]),
    "head size 16": (TRITON, H200, {"head_size": 16}, ["head_size is 16; it serves 32 to 512"]),
    "head size 31": (TRITON, H200, {"head_size": 31}, ["head_size is 31; it serves 32 to 512"]),
    "head size 513": (TRITON, H200, {"head_size": 513}, ["head_size is 513; it serves 32 to 512"]),
    "head size 513 on the cpu": (TORCH, CPU, {"head_size": 513}, ["head_size is 513; it serves 1 to 512"]),
    "float64": (TRITON, H200, {"dtype": torch.float64}, ["dtype is float64; it serves float16, bfloat16, float32"]),
    "float64 on the cpu": (TORCH, CPU, {"dtype": torch.float64}, [("dtype is float64; it serves float32, bfloat16, "
    "float16")]),
    "int8 queries": (TRITON, H200, {"dtype": torch.int8}, ["dtype is int8; it serves float16, bfloat16, float32"]),
    "an unknown cache dtype": (
        TRITON, H200, {"kv_cache_dtype": "nvfp4"}, [f"kv_cache_dtype is 'nvfp4'; unknown; it serves {EVERY_CACHE}"],
    ),
    "an unknown cache dtype on the cpu": (
        TORCH, CPU, {"kv_cache_dtype": "int4"}, [f"kv_cache_dtype is 'int4'; unknown; it serves {EVERY_CACHE}"],
    ),
    "a known cache dtype that is not served": (
        limited(supported_kv_cache_dtypes=("auto",)), CPU, {"kv_cache_dtype": "fp8"},
        ["kv_cache_dtype is 'fp8'; it serves auto"],
    ),
    "fp8 on an A100": (
        TRITON, A100, {"kv_cache_dtype": "fp8"},
        ["kv_cache_dtype 'fp8' needs compute capability 8.9; the device has 8.0"],
    ),
    "e5m2 on an A100": (
        TRITON, A100, {"kv_cache_dtype": "fp8_e5m2"},
        ["kv_cache_dtype 'fp8_e5m2' needs compute capability 8.9; the device has 8.0"],
    ),
    "block size 512": (TRITON, H200, {"block_size": 512}, ["block_size is 512; it serves multiples of 1 up to 256"]),
    "block size 24 of 16s": (
        limited(get_supported_kernel_block_sizes=staticmethod(lambda: [MultipleOf(16), 8])), CPU, {"block_size": 24},
        ["block_size is 24; it serves multiples of 16 and 8 up to 256"],
    ),
    "a kind of attention": (
        limited(supported_attn_types=(AttentionType.DECODER,)), CPU, {"attn_type": AttentionType.ENCODER},
        ["attn_type is encoder; it serves decoder"],
    ),
    "mla": (TRITON, H200, {"use_mla": True, "num_kv_heads": 1}, [NO_MLA]),
    "mla on the cpu": (TORCH, CPU, {"use_mla": True, "num_kv_heads": 1}, [NO_MLA]),
    "no mla for an mla backend": (
        limited(is_mla=classmethod(lambda cls: True)), CPU, {},
        ["it computes multi-head latent attention only (use_mla)"],
    ),
    "sparse": (TRITON, H200, {"use_sparse": True}, [NO_SPARSE]),
    "dense for a sparse backend": (
        limited(is_sparse=classmethod(lambda cls: True)), CPU, {}, ["it computes sparse attention only (use_sparse)"],
    ),
    "per-head scales": (TRITON, H200, {"use_per_head_quant_scales": True}, [ONE_SCALE]),
    "sinks": (limited(supports_sink=NO), CPU, {"has_sink": True}, ["it does not serve sinks (has_sink)"]),
    "spans": (
        limited(supports_mm_prefix=NO), CPU, {"use_mm_prefix": True},
        ["it does not serve bidirectional spans (use_mm_prefix)"],
    ),
    "alibi sqrt": (
        limited(supports_alibi_sqrt=NO), CPU, {"use_alibi_sqrt": True},
        ["it does not serve square-root ALiBi (use_alibi_sqrt)"],
    ),
    "non-causal": (
        limited(supports_non_causal=NO), CPU, {"use_non_causal": True},
        ["its decoder attention is causal (use_non_causal)"],
    ),
    "batch invariance": (
        TORCH, CPU, {"use_batch_invariant": True}, ["its results depend on the batch (use_batch_invariant)"],
    ),
    "connector": (
        limited(supports_kv_connector=NO), CPU, {"use_kv_connector": True},
        ["its blocks cannot leave the process (use_kv_connector)"],
    ),
    "everything at once": (
        TRITON, T4,
        {"head_size": 16, "use_mla": True, "num_kv_heads": 1, "use_sparse": True, "kv_cache_dtype": "fp8"},
        [
            "the device has compute capability 7.5; it needs 8.0",
            "head_size is 16; it serves 32 to 512",
            NO_MLA,
            NO_SPARSE,
            "kv_cache_dtype 'fp8' needs compute capability 8.9; the device has 7.5",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_is_not_served_gets_every_reason(name, make_config, refusals):
    backend, device, changes, reasons = REFUSED[name]

    assert refusals(backend, make_config(**changes), device) == reasons


def test_a_demand_that_there_is_not_is_refused(make_config):
    with pytest.raises(InvalidInput, match=r"^use_magic is no demand on a backend; there are has_sink, use_mm_prefix"):
        TRITON.validate_configuration(64, torch.float16, "auto", 16, False, False, False, False, (9, 0), "decoder",
                                      use_magic=True)  # fmt: skip


def test_calls_and_overrides_in_vllms_form_run():
    class Written(TritonAttentionBackend):
        @classmethod
        def get_supported_head_sizes(cls):
            return [64, 96]

        @classmethod
        def supports_combination(
            cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, device_capability
        ):
            return "not on this device" if device_capability == (9, 0) and has_sink else None

    layer = (64, torch.bfloat16, "auto", 16, False, True, False, False, DeviceCapability(9, 0), "decoder")

    assert TritonAttentionBackend.validate_configuration(*layer) == []
    assert Written.validate_configuration(*layer) == ["not on this device"]
    assert Written.validate_configuration(128, *layer[1:-2], (8, 0), "decoder") == [
        "head_size is 128; it serves 64, 96"
    ]
    with pytest.raises(InvalidInput, match=r"^head_size is 128; TRITON_ATTN serves 64, 96\.$"):
        Written.validate_head_size(128)


def test_an_empty_list_serves_anything():
    any_of = limited(
        supported_kv_cache_dtypes=(),
        get_supported_head_sizes=classmethod(lambda cls: []),
        get_supported_kernel_block_sizes=staticmethod(list),
    )

    assert any_of.supports_kv_cache_dtype("nvfp4")
    assert TORCH.supports_kv_cache_dtype(None)
    assert TORCH.supports_block_size(None)
    assert any_of.supports_head_size(1000)
    assert any_of.supports_block_size(7)


@pytest.mark.parametrize(("kind", "capability"), [("mps", None), ("cuda", None), ("cpu", DeviceCapability(9, 0))])
def test_a_device_is_a_cpu_or_has_a_capability(kind, capability):
    with pytest.raises(Unsupported, match=f"^type is '{kind}' with capability"):
        DeviceInfo(type=kind, capability=capability)


@pytest.mark.parametrize("name", REFUSED)
def test_selection_fails_with_the_reasons_of_every_backend(name, make_config):
    backend, device, changes, reasons = REFUSED[name]
    always = "AlwaysUnfit: it is never fit."
    unfit = subclass_attention_backend_with_overrides(
        "Unfit",
        TorchAttentionBackend,
        {
            "get_name": staticmethod(lambda: "AlwaysUnfit"),
            "validate_configuration": classmethod(lambda cls, *args, **demands: ["it is never fit"]),
        },
    )

    message = f"No attention backend serves this layer. {backend.get_name()}: {'; '.join(reasons)}. {always}"
    with pytest.raises(Unsupported, match=f"^{re.escape(message)}$"):
        select_backend(make_config(**changes), device, backends=(backend, unfit))


def test_there_are_thirty_bad_configurations():
    assert len(REFUSED) >= 30


def test_the_preferred_backend_that_serves_is_chosen(make_config):
    assert select_backend(make_config(), H200) is TritonAttentionBackend
    assert select_backend(make_config(), CPU) is TorchAttentionBackend
    assert select_backend(make_config(), "cpu") is TorchAttentionBackend
    assert select_backend(make_config(head_size=16), torch.device("cpu")) is TorchAttentionBackend


@pytest.mark.parametrize("attn_type", list(AttentionType))
@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_e5m2", "int8"])
def test_the_triton_backend_serves_every_kind_of_attention_and_cache_on_hopper(attn_type, cache, make_config, refusals):
    config = make_config(
        attn_type=attn_type, kv_cache_dtype=cache, has_sink=True, use_mm_prefix=True, use_non_causal=True,
        use_batch_invariant=True, use_alibi_sqrt=True, use_kv_connector=True,
    )  # fmt: skip

    assert refusals(TritonAttentionBackend, config, H200) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that this machine lacks")
def test_a_device_that_is_not_there_is_named(make_config):
    message = "device is cuda:0, but torch finds no CUDA device on this machine; use 'cpu'."
    with pytest.raises(Unsupported, match=f"^{re.escape(message)}$"):
        select_backend(make_config(), "cuda:0")


def test_a_backend_is_found_by_its_name():
    assert get_backend("TRITON_ATTN") is TritonAttentionBackend
    message = "name is 'FLASH_ATTN'; there are TRITON_ATTN, TORCH_ATTN, TRITON_MLA, TORCH_MLA."
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        get_backend("FLASH_ATTN")


IMPOSSIBLE = {
    "heads that do not divide": ({"num_heads": 30}, "num_heads is 30; it must be a multiple of num_kv_heads, 8."),
    "latents of two heads": (
        {"use_mla": True, "num_kv_heads": 2},
        "num_kv_heads is 2; it must be 1 with use_mla: all heads share a latent.",
    ),
    "no heads": ({"num_kv_heads": 0}, "num_kv_heads is 0; it must be an int of at least 1."),
    "a float head size": ({"head_size": 64.0}, "head_size is 64.0; it must be an int of at least 1."),
    "an empty block": ({"block_size": 0}, "block_size is 0; it must be an int of at least 1."),
    "the name of a dtype": ({"dtype": "float32"}, "dtype is 'float32'; it must be a torch.dtype."),
    "a bool": ({"num_heads": True}, "num_heads is True; it must be an int of at least 1."),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_demands_that_make_no_sense_are_refused_at_once(name, make_config):
    changes, message = IMPOSSIBLE[name]

    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        make_config(**changes)


def test_demands_are_frozen(make_config):
    config = make_config()

    assert isinstance(config, AttentionSelectorConfig)
    with pytest.raises(AttributeError):
        setattr(config, "head_size", 64)  # noqa: B010
