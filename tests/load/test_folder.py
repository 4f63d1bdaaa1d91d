"""Names, links, sizes and kinds of the files in a model folder."""

from __future__ import annotations

import os
import re

import pytest

from jattn.llm.load.folder import check_folder, member, read_config, read_json, read_text
from torch_core.base.errors import InvalidInput


@pytest.mark.parametrize(
    "name", ["../a", "a/b", "/etc/passwd", "..", ".", "", "a\\b", "a\0", "\ud800", "c:a", "a" * 256]
)
def test_a_name_that_could_leave_the_folder_is_refused(name, tmp_path):
    message = f"file name {name!r} is not a plain name inside the model folder."
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        member(tmp_path, name)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidInput, match=r"^config\.json is a link that leads out of the model folder; copy the"):
        member(folder, "config.json")


def test_a_link_within_the_folder_is_followed(tmp_path):
    (tmp_path / "real").write_text("x")
    (tmp_path / "config.json").symlink_to("real")
    path = member(tmp_path, "config.json")
    assert path is not None
    assert read_text(path) == "x"


@pytest.fixture
def snapshot(tmp_path):
    """The folder that huggingface_hub's snapshot_download returns, still empty."""
    folder = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123456789abcdef"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("place", ["models--org--name/blobs/ab12", "blobs/ab/ab12", "models--org--name/snapshots/1/a"])
def test_a_snapshot_of_the_hub_may_link_into_its_cache(place, snapshot):
    hub = snapshot.parents[2]
    blob = hub / place
    blob.parent.mkdir(parents=True)
    blob.write_text("x")
    (snapshot / "config.json").symlink_to(os.path.relpath(blob, snapshot))
    path = member(snapshot, "config.json")
    assert path is not None
    assert (path.name, read_text(path)) == ("config.json", "x")


@pytest.mark.parametrize("place", ["../secret", "secret", "models--org--other/blobs/ab12", "blobs"])
def test_a_snapshot_of_the_hub_may_link_nowhere_else(place, snapshot):
    target = snapshot.parents[2] / place
    if place != "blobs":
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("x")
    else:
        target.mkdir()
    (snapshot / "config.json").symlink_to(target)
    with pytest.raises(InvalidInput, match=r"^config\.json is (a link that leads out|not a regular file)"):
        member(snapshot, "config.json")


@pytest.mark.parametrize("parents", ["models--org--name/snapshot", "datasets--org--name/snapshots", "model/snapshots"])
def test_a_folder_that_is_no_snapshot_of_a_model_may_not_link_out(parents, tmp_path):
    folder = tmp_path / parents / "0123"
    folder.mkdir(parents=True)
    (folder.parent.parent / "blob").write_text("x")
    (folder / "config.json").symlink_to("../../blob")
    with pytest.raises(InvalidInput, match=r"^config\.json is a link that leads out of the model folder"):
        member(folder, "config.json")


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "config.json").symlink_to("other")
    (tmp_path / "other").symlink_to("config.json")
    with pytest.raises(InvalidInput, match=r"^config\.json cannot be read: Too many levels of symbolic links\.$"):
        member(tmp_path, "config.json")


def test_a_dangling_link_is_refused(tmp_path):
    (tmp_path / "config.json").symlink_to("nowhere")
    with pytest.raises(InvalidInput, match=r"^config\.json cannot be read: No such file or directory\.$"):
        member(tmp_path, "config.json")


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InvalidInput, match=r"^config\.json is not a regular file\.$"):
        member(tmp_path, "config.json")


def test_a_file_over_its_limit_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("12345")
    with pytest.raises(InvalidInput, match=r"^config\.json has 5 bytes; at most 4 are read\.$"):
        member(tmp_path, "config.json", max_bytes=4)


def test_an_absent_file_is_none(tmp_path):
    assert member(tmp_path, "config.json") is None


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"^folder 'x{100}' cannot be read: File name too long\.$"):
        check_folder("x" * 300)
    with pytest.raises(InvalidInput, match=r"^folder is '.*/nowhere'; it is not an existing folder\.$"):
        check_folder(tmp_path / "nowhere")


def test_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "a.json").write_bytes(b"ab\xff")
    with pytest.raises(InvalidInput, match=r"^a\.json is not UTF-8 text \(byte 2\)\.$"):
        read_text(tmp_path / "a.json")


def test_a_number_with_too_many_digits_is_refused():
    with pytest.raises(InvalidInput, match=r"^a\.json is not valid JSON: "):
        read_json('{"a": ' + "1" * 10_000 + "}", "a.json")


@pytest.mark.parametrize("number", ["-Infinity", '{"__float__": "-Infinity"}'])
def test_an_infinite_number_of_config_json_is_read(number, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"time_step_limit": [0.0, {number}]}}')
    assert read_config(tmp_path) == {"time_step_limit": [0.0, -float("inf")]}


def test_an_infinite_number_is_refused_elsewhere():
    with pytest.raises(InvalidInput, match=r"^the body contains Infinity, which is not JSON\.$"):
        read_json('{"a": Infinity}', "the body")
