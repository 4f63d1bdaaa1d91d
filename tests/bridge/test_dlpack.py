"""Views between JAX arrays and torch tensors: the same memory both ways, or one clear refusal."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn.bridge import to_jax, to_torch
from torch_core.base.errors import InvalidInput, Unsupported

SHARED = [
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]
SHARED_TEXT = "bfloat16, bool, float16, float32, float8_e4m3fn, float8_e5m2, int16, int32, int8, uint8"


def aligned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of zeros that starts on a 64-byte boundary, whatever torch's allocator does."""
    flat = torch.zeros(int(np.prod(shape)) + 64, dtype=dtype)
    skip = -flat.data_ptr() % 64 // flat.element_size()
    return flat[skip : skip + int(np.prod(shape))].view(shape)


@pytest.mark.parametrize("dtype", SHARED)
def test_a_torch_view_of_a_jax_array_has_its_pointer_shape_dtype_and_values(dtype: str) -> None:
    array = jnp.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    tensor = to_torch(array)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert tensor.dtype is getattr(torch, dtype)
    assert tensor.float().tolist() == [[0, 1, 1], [1, 0, 1]]


@pytest.mark.parametrize("dtype", SHARED)
def test_a_jax_view_of_a_torch_tensor_has_its_pointer_shape_dtype_and_values(dtype: str) -> None:
    tensor = aligned(2, 3, dtype=getattr(torch, dtype)).fill_(1)
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert array.dtype.name == dtype
    assert np.asarray(array, np.float32).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_view_and_a_view_of_the_view_are_one_memory() -> None:
    array = jnp.arange(6.0)
    assert to_jax(to_torch(array)).unsafe_buffer_pointer() == array.unsafe_buffer_pointer()


def test_what_torch_writes_through_a_view_shows_in_the_array() -> None:
    array = jnp.zeros(4)
    to_torch(array)[1] = 7
    assert array.tolist() == [0, 7, 0, 0]


def test_the_torch_view_keeps_the_memory_when_the_array_is_gone() -> None:
    tensor = to_torch(jnp.arange(1000.0) + 1)
    others = [jnp.zeros(1000) for _ in range(8)]
    assert len(others) == 8
    assert tensor.sum().item() == 500500


def test_the_jax_view_keeps_the_memory_when_the_tensor_is_gone() -> None:
    array = to_jax(aligned(1000) + 1)
    others = [aligned(1000) for _ in range(8)]
    assert len(others) == 8
    assert array.sum() == 1000


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_scalars_and_single_elements_are_viewed(shape: tuple[int, ...]) -> None:
    array = jnp.full(shape, 3.0)
    assert to_torch(array).data_ptr() == array.unsafe_buffer_pointer()
    assert to_torch(array).shape == shape


def test_empty_arrays_cross_with_shape_and_dtype() -> None:
    tensor = to_torch(jnp.zeros((0, 3), jnp.bfloat16))
    assert (tensor.shape, tensor.dtype) == ((0, 3), torch.bfloat16)
    array = to_jax(torch.zeros(2, 0, dtype=torch.float16))
    assert (array.shape, array.dtype) == ((2, 0), jnp.float16)


def test_a_tracer_is_refused() -> None:
    with pytest.raises(InvalidInput) as error:
        jax.jit(to_torch)(jnp.zeros(2))
    assert str(error.value) == (
        "array is a tracer: a function under jit has no memory to share. Call to_torch outside jit, or use "
        "jattn.bridge.call_torch inside."
    )


def test_a_deleted_array_is_refused() -> None:
    array = jnp.zeros(2)
    array.delete()
    with pytest.raises(InvalidInput) as error:
        to_torch(array)
    assert str(error.value) == (
        "array was deleted (its buffer was donated to a jitted call); use the array that the call returned."
    )


@pytest.mark.parametrize(("thing", "name"), [(np.zeros(2), "ndarray"), (torch.zeros(2), "Tensor"), ([1.0], "list")])
def test_what_is_no_jax_array_is_refused_by_to_torch(thing: object, name: str) -> None:
    with pytest.raises(InvalidInput) as error:
        to_torch(thing)  # pyright: ignore[reportArgumentType]
    assert str(error.value) == f"array is a {name}; to_torch needs a jax.Array."


@pytest.mark.parametrize(("thing", "name"), [(np.zeros(2), "ndarray"), (jnp.zeros(2), "ArrayImpl"), ([1.0], "list")])
def test_what_is_no_tensor_is_refused_by_to_jax(thing: object, name: str) -> None:
    with pytest.raises(InvalidInput) as error:
        to_jax(thing)  # pyright: ignore[reportArgumentType]
    assert str(error.value) == f"tensor is a {name}; to_jax needs a torch.Tensor."


@pytest.mark.parametrize("dtype", ["uint32", "complex64", "int4"])
def test_a_jax_dtype_that_is_not_shared_is_refused(dtype: str) -> None:
    with pytest.raises(Unsupported) as error:
        to_torch(jnp.zeros(2, dtype))
    assert str(error.value) == f"array has dtype {dtype}; torch and JAX share {SHARED_TEXT} without a copy."


def test_a_random_key_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"^array has dtype key<fry>; torch and JAX share "):
        to_torch(jax.random.key(0))


@pytest.mark.parametrize(("wide", "narrow"), [("int64", "int32"), ("float64", "float32")])
def test_a_dtype_that_jax_would_narrow_is_refused_with_the_dtype_to_use(wide: str, narrow: str) -> None:
    with pytest.raises(Unsupported) as error:
        to_jax(torch.zeros(2, dtype=getattr(torch, wide)))
    assert str(error.value) == (
        f"tensor has dtype {wide}; torch and JAX share {SHARED_TEXT} without a copy. JAX would convert it to "
        f"{narrow} in a copy; use {narrow}."
    )


def test_a_strided_tensor_is_refused_with_its_strides() -> None:
    with pytest.raises(InvalidInput) as error:
        to_jax(aligned(4, 6)[:, ::2])
    assert str(error.value) == (
        "tensor of shape (4, 3) has strides (6, 2); the row-major strides (3, 1) are required. Call "
        "tensor.contiguous() if a copy is meant."
    )


def test_a_transposed_tensor_is_refused_though_jax_would_take_it_in_another_layout() -> None:
    with pytest.raises(InvalidInput, match=r"^tensor of shape \(3, 2\) has strides \(1, 3\); the row-major "):
        to_jax(aligned(2, 3).T)


def test_a_misaligned_tensor_is_refused_with_the_offset() -> None:
    with pytest.raises(InvalidInput) as error:
        to_jax(aligned(32)[1:])
    assert str(error.value) == (
        "tensor starts 4 bytes past a 64-byte boundary, so JAX would copy it. Pass a tensor that owns its memory "
        "(tensor.clone()), not an offset view."
    )


def test_a_tensor_that_requires_grad_is_refused() -> None:
    with pytest.raises(InvalidInput) as error:
        to_jax(aligned(4).requires_grad_())
    assert str(error.value) == "tensor requires grad; JAX cannot follow torch's autograd. Pass tensor.detach()."


def test_a_tensor_on_a_foreign_device_is_refused() -> None:
    with pytest.raises(Unsupported) as error:
        to_jax(torch.zeros(2, device="meta"))
    assert str(error.value) == "tensor is on meta; jattn shares memory on cpu and cuda only."


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(InvalidInput) as error:
        to_jax(torch.eye(3).to_sparse())
    assert str(error.value) == "tensor has layout torch.sparse_coo; only a dense tensor has memory to share."


@pytest.mark.nightly
def test_an_array_over_two_devices_is_refused_and_its_shards_are_viewed() -> None:
    program = """
import jax, jax.numpy as jnp
from jattn.bridge import to_torch
from torch_core.base.errors import InvalidInput
mesh = jax.sharding.Mesh(jax.devices(), ("x",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
array = jax.device_put(jnp.arange(4.0), sharding)
try:
    to_torch(array)
except InvalidInput as error:
    print(error)
print([to_torch(shard.data).tolist() for shard in array.addressable_shards])
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "array is spread over 2 devices; a torch tensor lives on one. Pass array.addressable_shards[i].data.",
        "[[0.0, 1.0], [2.0, 3.0]]",
    ]
