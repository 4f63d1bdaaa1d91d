"""Which implementation runs: the caller's word, else the written rule, never something else in silence."""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn import ops
from jattn.ops.choose import choose
from tests.support.devices import mesh, on_four_devices
from tests.support.pretended_gpu import pretended_gpu
from torch_core.base.errors import InvalidInput, Unsupported

# An import would bind the function of that name.
choose_module: Any = sys.modules["jattn.ops.choose"]


def on_backend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: name)


CPU_DEFAULT = choose_module._CPU_DEFAULT


@pytest.mark.usefixtures("on_cpu")
def test_on_cpu_the_rule_takes_what_was_measured_to_be_faster() -> None:
    assert choose(None) == CPU_DEFAULT
    assert CPU_DEFAULT in ("torch", "xla")


@pytest.mark.parametrize(("backend", "expected"), [("gpu", "triton"), ("cpu", CPU_DEFAULT), ("tpu", "xla")])
def test_the_rule_follows_the_platform(backend: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_backend(monkeypatch, backend)
    assert choose(None) == expected


@pytest.mark.parametrize("name", ["torch", "xla"])
def test_an_explicit_request_is_honoured(name: str) -> None:
    assert choose(name) == name


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput) as error:
        choose("cuda")
    assert str(error.value) == (
        "implementation is 'cuda'; use one of 'triton', 'torch', 'xla', or None to let jattn choose."
    )


@pytest.mark.usefixtures("on_cpu")
def test_triton_is_refused_without_cuda_and_never_replaced() -> None:
    with pytest.raises(Unsupported) as error:
        choose("triton")
    assert str(error.value) == (
        "implementation='triton' cannot run here: it needs CUDA and JAX runs on 'cpu'; use implementation='torch' or "
        "'xla'."
    )


def test_torch_is_refused_on_a_platform_that_shares_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    on_backend(monkeypatch, "tpu")
    with pytest.raises(Unsupported) as error:
        choose("torch")
    assert str(error.value) == (
        "implementation='torch' cannot run here: torch shares no memory with JAX's backend 'tpu'; use "
        "implementation='xla'."
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch has CUDA")
def test_torch_is_refused_on_cuda_when_torch_was_built_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    on_backend(monkeypatch, "gpu")
    monkeypatch.setattr(choose_module.native, "why_not", lambda: None)
    choose_module._availability.cache_clear()
    with pytest.raises(Unsupported) as error:
        choose("torch")
    choose_module._availability.cache_clear()
    assert str(error.value) == (
        "implementation='torch' cannot run here: JAX runs on CUDA but torch was built without it; use "
        "implementation='triton' or 'xla'."
    )


@pytest.mark.usefixtures("on_cpu")
def test_the_table_of_implementations_names_all_and_the_reasons() -> None:
    table = ops.available_implementations()
    assert tuple(table) == ops.IMPLEMENTATIONS == ("triton", "torch", "xla")
    assert (table["torch"], table["xla"]) == (None, None)
    assert table["triton"] == "it needs CUDA and JAX runs on 'cpu'; use implementation='torch' or 'xla'."


def test_changing_the_table_changes_nothing() -> None:
    ops.available_implementations()["xla"] = "broken"
    assert ops.available_implementations()["xla"] is None


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "cuda"]])
def test_what_a_cpu_chose_is_not_exported_for_cuda(platforms: list[str]) -> None:
    def write(implementation: str | None) -> Any:
        cache, new = jnp.zeros((2, 2, 4, 1, 8)), jnp.ones((3, 1, 8))
        program = jax.jit(functools.partial(ops.write_kv_cache, implementation=implementation))
        return jax.export.export(program, platforms=platforms)(new, new, cache, jnp.arange(3, dtype=jnp.int32))

    with pytest.raises(Unsupported) as error:
        write(None)
    assert str(error.value) == (
        "implementation=None chose 'xla' because JAX runs on a CPU here, and the program is lowered for CUDA. Name the "
        "implementation: 'xla', or 'triton' where JAX sees the CUDA device that its kernels are compiled for."
    )
    assert write("xla").platforms == tuple(platforms)


@pytest.mark.usefixtures("on_cpu")
def test_the_choice_of_a_cpu_can_be_exported_for_a_cpu_differentiated_and_mapped() -> None:
    one, lse = jnp.ones((3, 2, 8)), jnp.zeros((3, 2))

    def merged(out: jax.Array) -> jax.Array:
        return ops.merge_states(out, lse, one, lse)[0].sum()

    assert jax.export.export(jax.jit(merged), platforms=["cpu"])(one).platforms == ("cpu",)
    np.testing.assert_array_equal(jax.jit(jax.grad(merged))(one), one / 2)
    np.testing.assert_array_equal(jax.jvp(jax.jit(merged), (one,), (one,))[1], 24.0)
    np.testing.assert_array_equal(jax.vmap(merged)(jnp.stack([one, one * 3])), [48.0, 96.0])


@on_four_devices
def test_steps_are_joined_in_one_launch_where_the_program_is_one_devices() -> None:
    found = {}

    def look(name: str) -> None:
        jax.jit(lambda: found.update({name: ops.launches_kernels(None)}))()

    with pretended_gpu():
        look("several")
        with jax.set_mesh(mesh("auto", tp=1)):
            look("a mesh of one")
        with jax.set_mesh(mesh("auto", tp=4)):
            look("a mesh of four")
            jax.shard_map(lambda: look("a shard_map"), in_specs=(), out_specs=None)()
    assert found == {"several": False, "a mesh of one": True, "a mesh of four": False, "a shard_map": True}
