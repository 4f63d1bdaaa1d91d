"""Where a model is read from: a Hugging Face folder, or one GGUF file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jattn.llm.load.config import family_of, parse_config
from jattn.llm.load.config_keys import is_whole, language_part
from jattn.llm.load.folder import check_folder, checked_overrides, read_config
from jattn.llm.load.generation import GenerationDefaults, read_generation_defaults
from jattn.llm.load.gguf.config import ROPE_TENSORS, family_of_gguf, generation_defaults_of_gguf, raw_config
from jattn.llm.load.gguf.file import GgufFile, open_gguf
from jattn.llm.load.gguf.tokenizer import tokenizer_of_gguf
from jattn.llm.load.gguf.weights import gguf_tensors
from jattn.llm.load.packed_integers import named_tensors, unpacked_tensors
from jattn.llm.load.packing import read_packing
from jattn.llm.load.plan import ParameterPlan, fewest_tensors, found_name, plan_parameters, spelled_as_found
from jattn.llm.load.sentence import SentenceModules, read_sentence_modules
from jattn.llm.load.tensor_file import Tensors
from jattn.llm.load.tokenizer import TextTokenizer, read_tokenizer
from jattn.llm.load.weights import (
    check_count,
    check_weights,
    find_weights,
    with_computed,
    with_tied_head,
    without_plain_norms,
)
from jattn.llm.models import ModelConfig
from jattn.llm.paths import is_gguf
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput, Unsupported

#: Tensors other than those of a language model.
_NOT_LANGUAGE = r"(?!language_model\.|model\.language_model\.|lm_head\.).+"


class ModelSource(Protocol):
    """The parts of a model, each read and checked when it is asked for."""

    @property
    def path(self) -> Path:
        """The folder or the file."""
        ...

    def raw_config(self, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the object of a config.json, with values that replace those of the file."""
        ...

    def parse(self, raw: dict[str, Any]) -> ModelConfig:
        """Returns the config of such an object, with the tokens of the generation's defaults."""
        ...

    def weights(self, raw: dict[str, Any], config: ModelConfig) -> tuple[Tensors, tuple[ParameterPlan, ...]]:
        """Returns the tensors, compared with those that the config asks for, and where each one goes."""
        ...

    @property
    def has_tokenizer(self) -> bool:
        """There is a tokenizer."""
        ...

    def tokenizer(self) -> TextTokenizer:
        """Returns the tokenizer."""
        ...

    def generation_defaults(self) -> GenerationDefaults:
        """Returns the settings that the model's authors recommend."""
        ...

    def sentence_modules(self) -> SentenceModules:
        """Returns how vectors of texts are pooled, and the layers and prompts for them."""
        ...


def open_source(model: str | os.PathLike[str]) -> ModelSource:
    """Returns the source that a path or a name of the hub's cache stands for.

    Raises:
        InvalidInput: there is no such folder or file, or the file is broken.
        Unsupported: a GGUF file that this build does not read.
    """
    if is_gguf(model):
        try:
            path = Path(model).resolve()
        except ValueError as error:
            raise InvalidInput("model", f"{shown(str(model))} cannot be read: {error}") from None
        return _GgufSource(path, open_gguf(path))
    return _FolderSource(check_folder(model))


def load_tokenizer(folder: str | os.PathLike[str]) -> TextTokenizer:
    """Reads tokenizer.json of a model folder, or the vocabulary of a GGUF file, and its chat template.

    Truncation and padding, which would change prompts, are switched off.

    Raises:
        InvalidInput: there is none, it is broken, or a part of it lets a text grow without bound.
        Unsupported: the folder has a sentencepiece model only, or the file a vocabulary of an unknown kind.
    """
    return open_source(folder).tokenizer()


def load_generation_defaults(folder: str | os.PathLike[str]) -> GenerationDefaults:
    """Reads generation_config.json of a model folder, or the keys of a GGUF file; everything is None without them.

    `max_length` is not looked at: it counts the prompt.

    Raises:
        InvalidInput: the file is broken or a value is out of range.
    """
    return open_source(folder).generation_defaults()


def load_sentence_modules(folder: str | os.PathLike[str]) -> SentenceModules:
    """Reads the files of sentence-transformers in a model folder; a folder or a GGUF file without them says nothing.

    Raises:
        InvalidInput: a file is broken, or contradicts another.
    """
    return open_source(folder).sentence_modules()


@dataclass(frozen=True, slots=True)
class _FolderSource:
    path: Path

    def raw_config(self, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        files = [] if (self.path / "config.json").exists() else sorted(self.path.glob("*.gguf"))
        if files:
            wanted = f"name one of them, as in {files[0].name}"
            raise InvalidInput("folder", "has GGUF files and no config.json", wanted)
        return read_config(self.path, overrides)

    def parse(self, raw: dict[str, Any]) -> ModelConfig:
        config, defaults = parse_config(raw), self.generation_defaults()
        names = ("bos_token_id", "eos_token_ids", "forced_eos_token_id")
        if config.encoder is not None:
            names += ("decoder_start_token_id", "forced_bos_token_id")
        named = {name: getattr(defaults, name) for name in names}
        try:
            return dataclasses.replace(config, **{name: value for name, value in named.items() if value is not None})
        except InvalidInput as error:
            raise error.under("generation_config.json") from None

    def weights(self, raw: dict[str, Any], config: ModelConfig) -> tuple[Tensors, tuple[ParameterPlan, ...]]:
        tensors, family = find_weights(self.path), family_of(config)
        check_count(tensors, fewest_tensors(config, family))
        embedding = str(family.tensor_name("embed_tokens", config))
        is_bare = f"{embedding.removeprefix(family.prefix)}.weight" in tensors
        plan, whole = plan_parameters(config, prefix="" if is_bare else None), is_whole(raw, family)
        packing = read_packing(language_part(raw, family).get("quantization_config") or {})
        named = tensors if packing is None else named_tensors(tensors, packing)
        plan = spelled_as_found(plan, named, family, is_whole=whole)
        tensors = without_plain_norms(tensors, plan, config, family)
        tensors = with_computed(tensors, plan, config, family)
        if packing is not None:
            tensors = unpacked_tensors(tensors, plan, packing)
        if config.tie_word_embeddings:
            names = {parameter.path: parameter.pieces[0].name for parameter in plan}
            head = found_name(f"{family.tensor_name('lm_head', config)}.weight", tensors, family, whole)
            tensors = with_tied_head(tensors, names["embed_tokens", "embedding"], head)
        unread = _NOT_LANGUAGE if whole else family.unread.replace("{layers}", str(config.num_hidden_layers))
        check_weights(tensors, plan, unread=unread)
        return tensors, plan

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / "tokenizer.json").exists()

    def tokenizer(self) -> TextTokenizer:
        return read_tokenizer(self.path)

    def generation_defaults(self) -> GenerationDefaults:
        return read_generation_defaults(self.path)

    def sentence_modules(self) -> SentenceModules:
        return read_sentence_modules(self.path)


@dataclass(frozen=True, slots=True)
class _GgufSource:
    path: Path
    file: GgufFile

    def raw_config(self, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        given = checked_overrides(overrides)
        left_out = {key for key, value in given.items() if value is None and key in self.file.metadata}
        metadata = self.file.metadata.without(left_out)
        try:
            raw = raw_config(metadata, self.file.weights)
        except (InvalidInput, Unsupported) as error:
            raise error.under(self.path.name) from None
        return {**raw, **{key: value for key, value in given.items() if key not in left_out}}

    def parse(self, raw: dict[str, Any]) -> ModelConfig:
        try:
            return parse_config(raw)
        except (InvalidInput, Unsupported) as error:
            raise error.under(self.path.name) from None

    def weights(self, raw: dict[str, Any], config: ModelConfig) -> tuple[Tensors, tuple[ParameterPlan, ...]]:
        family = family_of(config).of_gguf()
        tensors = dict.fromkeys(self.file.weights.tensors, self.file.weights)
        check_count(tensors, fewest_tensors(config, family))
        plan = plan_parameters(config, family=family)
        tensors = gguf_tensors(self.file.weights, plan, family)
        check_weights(tensors, plan, unread=ROPE_TENSORS)
        return tensors, plan

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.ggml.model" in self.file.metadata

    def tokenizer(self) -> TextTokenizer:
        spelling = family_of_gguf(self.file.metadata).gguf
        try:
            return tokenizer_of_gguf(self.file.metadata, None if spelling is None else spelling.pre_tokenizer)
        except (InvalidInput, Unsupported) as error:
            raise error.under(self.path.name) from None

    def generation_defaults(self) -> GenerationDefaults:
        try:
            return generation_defaults_of_gguf(self.file.metadata)
        except InvalidInput as error:
            raise error.under(self.path.name) from None

    def sentence_modules(self) -> SentenceModules:
        return SentenceModules()
