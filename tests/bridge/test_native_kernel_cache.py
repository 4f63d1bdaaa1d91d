"""The kernel cache: compiled once, whole on disk, and only in a directory that nobody else can write."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from triton import knobs

from jattn.bridge import kernel_cache
from jattn.bridge.kernel_cache import KernelCache, default_directory
from tests.support.sample_kernels import double_and_add
from torch_core.base.errors import Unsupported
from torch_core.launch.compile import KernelVariant, compile_variant, kernel_variant


@pytest.fixture(scope="module")
def variants():
    plan = double_and_add()
    return [kernel_variant(launch, plan.specs) for launch in plan.launches]


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "kernels"


def _copy_kernel(folder: Path, fields: str) -> KernelVariant:
    """A kernel of a module of its own that hands two pointers on as a tuple with the given fields."""
    folder.mkdir()
    (folder / "copying.py").write_text(
        f"""
from collections import namedtuple

import triton
import triton.language as tl

Places = namedtuple("Places", "{fields}")


@triton.jit
def _copy(places):
    tl.store(places.to, tl.load(places.at))


@triton.jit
def copy_kernel(x_ptr, y_ptr):
    _copy(Places(x_ptr, y_ptr))
"""
    )
    spec = importlib.util.spec_from_file_location("copying", folder / "copying.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return KernelVariant(
        kernel=module.copy_kernel,
        signature=(("x_ptr", "*fp32"), ("y_ptr", "*fp32")),
        constants=(),
        divisible=(),
        num_warps=1,
        num_stages=1,
        maxnreg=None,
    )


def test_a_kernel_is_compiled_once_in_a_process(variants):
    cache = KernelCache(None)
    assert cache.get(variants[0], 90) is cache.get(variants[0], 90)
    assert cache.num_compiled == 1


def test_two_kernels_compile_at_once_and_one_that_two_threads_want_once(variants, monkeypatch):
    cache, together, compiled = KernelCache(None), threading.Barrier(2, timeout=60), []

    def compile_with_the_other(variant, arch):
        together.wait()
        compiled.append(variant)
        return compile_now(variant, arch)

    compile_now = kernel_cache._compile
    monkeypatch.setattr(kernel_cache, "_compile", compile_with_the_other)
    with ThreadPoolExecutor(4) as threads:
        images = list(threads.map(lambda variant: cache.get(variant, 90), [*variants, *variants]))

    assert images[:2] == images[2:]
    assert sorted(compiled, key=variants.index) == variants
    assert cache.num_compiled == 2


def test_an_interrupt_while_a_kernel_compiles_ends_that_thread_alone(variants, monkeypatch):
    cache, begun, go_on = KernelCache(None), threading.Event(), threading.Event()

    def interrupted(variant, arch):
        monkeypatch.undo()
        begun.set()
        go_on.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel_cache, "_compile", interrupted)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cache.get, variants[0], 90)
        begun.wait(60)
        second = threads.submit(cache.get, variants[0], 90)
        # Time to find the compilation under way; without it the kernel is simply compiled.
        while not second.running():
            pass
        go_on.set()

    assert isinstance(first.exception(), KeyboardInterrupt)
    assert second.result().cubin


def test_a_kernel_that_does_not_compile_is_tried_again(variants, monkeypatch):
    cache = KernelCache(None)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_cache, "_compile", lambda *_: pytest.fail("planted"))
        with pytest.raises(pytest.fail.Exception, match="planted"):
            cache.get(variants[0], 90)

    assert cache.get(variants[0], 90).cubin


def test_a_kernel_on_disk_is_not_compiled_again(variants, directory):
    first = KernelCache(directory)
    images = [first.get(variant, 90) for variant in variants]
    second = KernelCache(directory)
    assert [second.get(variant, 90) for variant in variants] == images
    assert (first.num_compiled, second.num_compiled) == (2, 0)


def test_the_directory_and_its_files_are_private_and_whole(variants, directory):
    cache = KernelCache(directory)
    for variant in variants:
        cache.get(variant, 90)
    assert directory.stat().st_mode & 0o777 == 0o700
    files = list(directory.iterdir())
    assert [file.suffix for file in files] == [".json", ".json"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)


def test_what_lies_in_tritons_own_cache_is_not_believed(variants, tmp_path, monkeypatch):
    """Triton checks neither owner nor content of its cache: whoever can write there would choose the code."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "shared"))
    honest = compile_variant(variants[0], 90).asm["ptx"]
    (planted,) = (tmp_path / "shared").rglob("*.ptx")
    planted.write_text("// not ours")
    assert compile_variant(variants[0], 90).asm["ptx"] == "// not ours"
    assert KernelCache(None).get(variants[0], 90).ptx == honest


def test_a_compilation_leaves_tritons_settings_the_environment_and_no_files_behind(variants, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "tritons"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = dict(os.environ), dict(knobs.cache.__dict__)
    KernelCache(None).get(variants[0], 90)
    assert (dict(os.environ), dict(knobs.cache.__dict__)) == before
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_is_compiled_again_when_the_fields_of_a_tuple_that_it_hands_on_change_places(tmp_path, directory):
    kernels = [_copy_kernel(tmp_path / str(number), fields) for number, fields in enumerate(("to, at", "at, to"))]
    assert len({variant.source().hash() for variant in kernels}) == 1  # Triton's own hash does not see it
    caches = [KernelCache(directory) for _ in kernels]
    codes = [cache.get(variant, 90).ptx for cache, variant in zip(caches, kernels, strict=True)]
    assert [cache.num_compiled for cache in caches] == [1, 1]
    assert codes[0] != codes[1]
    again = KernelCache(directory)
    assert [again.get(variant, 90).ptx for variant in kernels] == codes
    assert again.num_compiled == 0


@pytest.mark.parametrize("damage", ["cut", "changed", "no json", "other fields"])
def test_a_damaged_file_is_compiled_anew_and_replaced(variants, directory, damage):
    image = KernelCache(directory).get(variants[0], 90)
    (file,) = directory.iterdir()
    text = file.read_text()
    record = json.loads(text)
    record["kernel"]["ptx"] += "\n// not ours"
    damaged = {
        "cut": text[: len(text) // 2],
        "changed": json.dumps(record),
        "no json": "kernel",
        "other fields": json.dumps({"kernel": {}}),
    }
    file.write_text(damaged[damage])
    again = KernelCache(directory)
    assert again.get(variants[0], 90) == image
    assert again.num_compiled == 1
    assert file.read_text() == text


def test_another_architecture_is_another_kernel(variants, directory):
    cache = KernelCache(directory)
    assert ".target sm_80" in cache.get(variants[0], 80).ptx
    assert ".target sm_90a" in cache.get(variants[0], 90).ptx
    assert len(list(directory.iterdir())) == 2


def test_a_full_disk_costs_a_later_compilation_and_leaves_no_file_behind(variants, directory, monkeypatch):
    cache = KernelCache(directory)

    replace = os.replace

    def refuse(source, target):
        if Path(target).parent == directory:
            raise OSError("disk full")
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        image = cache.get(variants[0], 90)
    assert list(directory.iterdir()) == []
    again = KernelCache(directory)
    assert again.get(variants[0], 90) == image
    assert again.num_compiled == 1


def test_a_directory_that_others_may_write_is_refused(directory):
    directory.mkdir(mode=0o700)
    directory.chmod(0o777)
    with pytest.raises(Unsupported, match=rf"others may write the cache .*; run: chmod go-w {directory}"):
        KernelCache(directory)


def test_a_symbolic_link_is_refused(tmp_path, directory):
    directory.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(directory)
    with pytest.raises(Unsupported, match="is a symbolic link; name the directory itself"):
        KernelCache(link)


def test_a_parent_that_everybody_may_write_is_refused(tmp_path):
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(Unsupported, match=rf"everybody may replace the cache .*; run: chmod o-w {parent}"):
        KernelCache(parent / "kernels")


def test_a_directory_of_another_user_is_refused(directory, monkeypatch):
    KernelCache(directory)
    monkeypatch.setattr(os, "getuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(Unsupported, match=r"belongs to user \d+; use one of your own"):
        KernelCache(directory)


def test_the_default_directory_is_in_the_users_cache():
    assert default_directory().parts[-3:] == (".cache", "jattn", "kernels")
