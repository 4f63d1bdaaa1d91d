"""Safe access to the files of a model folder: names, links, sizes and JSON are checked before anything is used."""

from __future__ import annotations

import collections
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jattn.llm.paths import is_hub_name, missing
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput

# Of Gemma 3 tokenizer_config.json alone has 1.2 MB.
_MAX_JSON_BYTES = 16 << 20
_INFINITIES = ("Infinity", "-Infinity")


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """Returns the folder as a resolved path.

    A name like `org/name` that is no folder here is looked up in the cache of huggingface_hub, if that package is
    installed; nothing is fetched.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise InvalidInput("folder", f"is a {type(folder).__name__}", "it must be a path")
    path = Path(folder)
    try:
        if path.is_dir():
            return path.resolve()
    except (OSError, ValueError) as error:
        raise InvalidInput("folder", f"{str(path)[:100]!r} cannot be read: {error.args[-1]}") from None
    cached, reason = _cached_snapshot(folder) if isinstance(folder, str) else (None, "")
    if cached is None:
        raise missing(str(path), reason)
    return cached


def read_given(name: str, path: str | os.PathLike[str]) -> str:
    """Returns the text of a file that the user names, in any folder."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(name, f"{str(path)!r} cannot be read: {error}") from None


def member(folder: Path, name: str, *, max_bytes: int | None = None, inside: str = "") -> Path | None:
    """Returns the path of a regular file directly inside the folder, or None if the name does not exist.

    A link may lead to another file of the folder; in a snapshot of the Hugging Face hub, also to one of its cache
    (`models--org--name`, or the `blobs` that all models of the cache share).
    The name and that of a subfolder, `inside`, may come from a file that someone else wrote.
    """
    for part in (name, *([inside] if inside else ())):
        if not part.isprintable() or part in ("", ".", "..") or any(mark in part for mark in "/\\:") or len(part) > 255:
            raise InvalidInput(f"file name {part!r} is not a plain name inside the model folder.")
    path = folder / inside / name
    if not os.path.lexists(path):
        return None
    try:
        resolved = Path(os.path.realpath(path, strict=True))
        status = resolved.stat()
    except OSError as error:
        raise InvalidInput(name, f"cannot be read: {error.strerror}") from None
    if not any(resolved.is_relative_to(home) for home in _homes(folder)):
        wanted = "copy the folder with its links followed"
        raise InvalidInput(name, "is a link that leads out of the model folder", wanted)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidInput(name, "is not a regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise InvalidInput(name, f"has {status.st_size} bytes", f"at most {max_bytes} are read")
    return path


def read_text(path: Path) -> str:
    """Returns the file as text, which must be UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(path.name, f"is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise InvalidInput(path.name, f"cannot be read: {error.strerror}") from None


def read_object(folder: Path, name: str, *, has_infinity: bool = False, inside: str = "") -> dict[str, Any]:
    """Returns the JSON object in a file of the folder, at most 16 mebibytes long; see `member` and `read_json`."""
    file = member(folder, name, max_bytes=_MAX_JSON_BYTES, inside=inside)
    name = f"{inside}/{name}" if inside else name
    if file is None:
        raise InvalidInput(f"the folder has no {name}.")
    return read_json(read_text(file), name, has_infinity=has_infinity)


def read_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the keys of config.json, with the values of `hf_overrides` in place of the file's."""
    return {**read_object(folder, "config.json", has_infinity=True), **checked_overrides(overrides)}


def checked_overrides(overrides: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns `hf_overrides` if it is a mapping of keys, or None."""
    if not isinstance(overrides, Mapping | None):
        wanted = "it must be a mapping of keys of config.json to values"
        raise InvalidInput("hf_overrides", value=overrides, wanted=wanted)
    for key in overrides or {}:
        if not isinstance(key, str):
            raise InvalidInput("hf_overrides", f"has the key {shown(key)}", "keys of config.json are text")
    return overrides or {}


def read_json(text: str, name: str, *, has_infinity: bool = False) -> dict[str, Any]:
    """Parses a JSON object strictly, with no repeated keys, NaN or Infinity; errors name the file by `name`.

    With `has_infinity` numbers may be infinite: `Infinity`, as Python writes them, or `{"__float__": "Infinity"}`, as
    transformers does.
    """
    value = _parsed(text, name, has_infinity)
    if not isinstance(value, dict):
        raise InvalidInput(name, f"holds a JSON {type(value).__name__}", "it must be an object")
    return value


def read_list(text: str, name: str) -> list[Any]:
    """Parses a JSON array as strictly."""
    value = _parsed(text, name, False)
    if not isinstance(value, list):
        raise InvalidInput(name, f"holds a JSON {type(value).__name__}", "it must be an array")
    return value


def _parsed(text: str, name: str, has_infinity: bool) -> Any:

    def object_of(pairs: list[tuple[str, Any]]) -> Any:
        result = dict(pairs)
        if has_infinity and len(pairs) == 1 and result.get("__float__") in _INFINITIES:
            return float(result["__float__"])
        if len(result) != len(pairs):
            counts = collections.Counter(key for key, _ in pairs)
            raise InvalidInput(name, f"has the key {counts.most_common(1)[0][0]!r} more than once")
        return result

    def constant(text: str) -> float:
        if has_infinity and text in _INFINITIES:
            return float(text)
        raise InvalidInput(name, f"contains {text}, which is not JSON")

    # Numbers are parsed by functions of Python, between which other threads run.
    numbers: dict[str, Any] = {"parse_int": lambda digits: int(digits), "parse_float": lambda digits: float(digits)}
    try:
        return json.loads(text, object_pairs_hook=object_of, parse_constant=constant, **numbers)
    except InvalidInput:
        raise
    except RecursionError:
        raise InvalidInput(name, "is nested too deeply") from None
    except ValueError as error:
        raise InvalidInput(name, f"is not valid JSON: {error}") from None


def _cached_snapshot(name: str) -> tuple[Path | None, str]:
    """Returns the downloaded snapshot of a model of the hub, or None and why there is none."""
    if not is_hub_name(name):
        return None, ""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None, ", and without huggingface_hub its cache is not searched"
    try:
        return Path(snapshot_download(name, local_files_only=True)).resolve(), ""
    except (OSError, ValueError):
        return None, f", and the Hugging Face cache has no such model; fetch it with `hf download {name}`"


def _homes(folder: Path) -> tuple[Path, ...]:
    """The folders that the links of a model folder may lead to."""
    cache = folder.parent.parent
    if folder.parent.name == "snapshots" and cache.name.startswith("models--"):
        return cache, cache.parent / "blobs"
    return (folder,)
