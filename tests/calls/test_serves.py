"""The table of what each implementation serves: every limit refuses what it says, and names who does serve it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.attention_plans import backward_call, dense_call, latent_call, paged_call
from tests.support.delta_cases import delta_backward_call, delta_call
from tests.support.mamba_cases import mamba_backward_call, mamba_call
from torch_core.attention.merge_call import MergeCall
from torch_core.base.errors import Unsupported
from torch_core.base.specs import ArraySpec
from torch_core.cache_writes.call import WriteCall
from torch_core.latent.call import LatentWriteCall
from torch_core.launch.serves import IMPLEMENTATIONS, refuse_unserved
from torch_core.launch.tensors import array_spec
from torch_core.serves import SERVES, serves_table


def _wide(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "float64")


def _paged(dtype: str, cache: str, *, head_size: int = 128, block_size: int = 16, **changes):
    return paged_call(
        query=ArraySpec((4, 8, head_size), dtype),
        kv_cache=ArraySpec((64, 2, block_size, 2, head_size), cache),
        **changes,
    )


#: (row of the table, a call beyond a limit, who serves it all the same).
BEYOND = [
    ("query dtype", _paged("float64", "float64"), {"xla"}),
    ("query dtype", dense_call(query=_wide(300, 8, 128), key=_wide(300, 2, 128), value=_wide(300, 2, 128)), {"xla"}),
    (
        "query dtype",
        dense_call(
            **{
                name: ArraySpec((300, heads, 128), "float8_e4m3fn")
                for name, heads in (("query", 8), ("key", 2), ("value", 2))
            }
        ),
        set(),
    ),
    (
        "query dtype",
        MergeCall(out_a=_wide(3, 2, 8), lse_a=_wide(3, 2), out_b=_wide(3, 2, 8), lse_b=_wide(3, 2)),
        {"xla"},
    ),
    (
        "key/value dtype",
        WriteCall(
            key=_wide(3, 2, 8),
            value=_wide(3, 2, 8),
            slot_mapping=ArraySpec((3,), "int32"),
            kv_cache=_wide(4, 2, 4, 2, 8),
        ),
        {"xla"},
    ),
    ("key/value dtype", _paged("float8_e4m3fn", "float32"), {"torch", "xla"}),
    ("head size", _paged("bfloat16", "bfloat16", head_size=576), {"torch", "xla"}),
    ("batch_invariant", replace(_paged("bfloat16", "bfloat16"), batch_invariant=True), {"triton", "xla"}),
    ("batch_invariant", latent_call(batch_invariant=True), {"xla"}),
    ("head size", latent_call(rank=640), {"torch", "xla"}),
    ("head size", latent_call(rope_dim=136), {"torch", "xla"}),
    (
        "biases, bidirectional ranges and a causal flag per sequence over latents",
        latent_call(alibi_slopes=ArraySpec((16,), "float32")),
        {"torch", "xla"},
    ),
    ("key/value dtype", latent_call("float64"), {"xla"}),
    (
        "key/value dtype",
        LatentWriteCall(
            kv_c=_wide(3, 6), k_pe=_wide(3, 2), slot_mapping=ArraySpec((3,), "int32"), latent_cache=_wide(4, 4, 8)
        ),
        {"xla"},
    ),
    ("block size", latent_call(block_size=512), {"torch", "xla"}),
    ("block size", _paged("bfloat16", "bfloat16", block_size=512), {"torch", "xla"}),
    ("strides", paged_call(query=ArraySpec((4, 8, 128), "bfloat16", (1, 4, 32))), {"torch", "xla"}),
    ("strides", paged_call(sinks=ArraySpec((8,), "float32", (2,))), {"torch", "xla"}),
    ("reverse derivatives", backward_call(qq_bias=ArraySpec((200, 200), "float32")), {"xla"}),
    (
        "gated delta rule's derivative (gated_delta_backward)",
        delta_backward_call(delta_call(0, (2,), sizes=(130, 4))).map(array_spec),
        {"torch", "xla"},
    ),
    (
        "Mamba-2's derivative (mamba_chunk_scan_backward)",
        mamba_backward_call(mamba_call(0, (2,), sizes=(260, 4), dtype="bfloat16")).map(array_spec),
        {"torch", "xla"},
    ),
]


@pytest.mark.parametrize(
    ("feature", "call", "served_by"), BEYOND, ids=[f"{row[0]}-{i}" for i, row in enumerate(BEYOND)]
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_limit_refuses_what_is_beyond_it_and_says_who_serves_it(feature, call, served_by, implementation):
    call.check()
    if implementation in served_by:
        refuse_unserved(call, implementation)
        return
    with pytest.raises(Unsupported) as error:
        refuse_unserved(call, implementation)
    text = str(error.value)
    assert f"implementation {implementation!r} does not serve" in text
    assert all(f"{other!r}" in text for other in served_by)
    assert served_by or "no implementation does" in text


def test_a_refusal_names_what_the_caller_named():
    call = _paged("bfloat16", "bfloat16", head_size=576)
    with pytest.raises(Unsupported) as error:
        refuse_unserved(call, "triton", named="torch")
    assert str(error.value) == (
        "paged_attention: head_size is 576 and its limit 512, which implementation 'torch' does not serve; "
        "implementation 'xla' does. On CUDA 'torch' launches the kernels of 'triton'."
    )


def test_every_row_with_a_limit_is_walked():
    limited = {row.feature for row in SERVES if row.limit is not None}
    assert limited == {feature for feature, _, _ in BEYOND}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_ordinary_call_is_served_by_everybody(implementation):
    refuse_unserved(paged_call(), implementation)
    refuse_unserved(latent_call(), implementation)
    refuse_unserved(dense_call(), implementation)
    refuse_unserved(backward_call(), implementation)


def test_the_table_has_a_cell_for_each_implementation():
    assert all(set(row.text) == set(IMPLEMENTATIONS) and all(row.text.values()) for row in SERVES)
    assert serves_table().count("\n") == len(SERVES) + 2
