"""load_model and save_model as a whole: round trips, dtypes, the tokenizer, token ids and what is refused."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import resource
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, models

from jattn.llm.load import TextTokenizer, load_model, load_tokenizer, save_model
from jattn.llm.models.attention import Attention
from tests.support.tiny_models import byte_tokenizer, dense_logits, tiny_config, tiny_model, write_tiny_model
from torch_core.base.errors import InvalidInput, JattnError, Unsupported


def refused(folder, message, error: type[JattnError] = InvalidInput):
    with pytest.raises(error, match="^" + re.escape(message)):
        load_model(folder)


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"num_key_value_heads": 4}], ids=str
)
def test_a_saved_model_loads_bit_for_bit(changes, tmp_path, seed):
    config = tiny_config(**changes)
    model = tiny_model(config, seed)
    save_model(tmp_path, model, config, byte_tokenizer())
    loaded, loaded_config, tokenizer = load_model(tmp_path)
    assert loaded_config == config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), nnx.state(model))
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("naïve")) == "naïve"


def test_saving_twice_writes_the_same_bytes(tmp_path, seed):
    config = tiny_config()
    for name in ("first", "second"):
        save_model(tmp_path / name, tiny_model(config, seed), config, byte_tokenizer())
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "second").iterdir())
    assert all((tmp_path / "first" / n).read_bytes() == (tmp_path / "second" / n).read_bytes() for n in names)


@pytest.mark.usefixtures("on_cpu")
def test_a_bfloat16_file_is_computed_in_float32_on_a_cpu_by_default(tmp_path, seed):
    folder = write_tiny_model(tmp_path, seed, dtype="bfloat16")
    model, config, _ = load_model(folder)
    assert config.dtype == "float32"
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_explicit_dtype_is_the_dtype_of_every_parameter(dtype, tmp_path, seed):
    model, config, _ = load_model(write_tiny_model(tmp_path, seed), dtype=dtype)
    assert config.dtype == dtype
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model))} == {dtype}


def test_the_implementation_reaches_every_layer(tmp_path, seed):
    model, _, _ = load_model(write_tiny_model(tmp_path, seed), implementation="xla")
    for layer in model.layers:
        assert isinstance(layer.self_attn, Attention)
        assert layer.self_attn.paged_attention.implementation == "xla"


def test_an_unknown_dtype_is_refused(tmp_path, seed):
    folder = write_tiny_model(tmp_path, seed)
    with pytest.raises(InvalidInput, match=r"^dtype is an int of 16610 bits; it must be one of float32, "):
        load_model(folder, dtype=10**5000)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidInput, match=r"^dtype is 'float64'; it must be one of float32, bfloat16, float16, or"):
        load_model(folder, dtype="float64")
    with pytest.raises(InvalidInput, match=r"^dtype is 'int8'; it must be one of float32, bfloat16, float16, or None"):
        save_model(folder, tiny_model(tiny_config(), seed), tiny_config(), dtype="int8")


def test_end_of_text_ids_of_the_generation_config_win(tmp_path, seed):
    folder = write_tiny_model(tmp_path, seed)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4], "temperature": 0.6}')
    assert load_model(folder)[1].eos_token_ids == (3, 4)
    (folder / "generation_config.json").unlink()
    assert load_model(folder)[1].eos_token_ids == (0,)


def test_a_generation_config_with_an_impossible_id_is_refused(tmp_path, seed):
    folder = write_tiny_model(tmp_path, seed)
    (folder / "generation_config.json").write_text('{"eos_token_id": 257}')
    refused(folder, "generation_config.json: eos_token_ids[0] is 257; it must be a token id from 0 to 256.")


def test_a_folder_without_config_is_refused(tmp_path):
    refused(tmp_path, "the folder has no config.json.")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path, seed):
    folder = write_tiny_model(tmp_path, seed)
    vocabulary = {chr(0x100 + index): index for index in range(258)}
    Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0x100))).save(str(folder / "tokenizer.json"))
    refused(folder, "tokenizer.json has token ids up to 257; vocab_size is 257.")


def test_added_tokens_that_the_model_has_no_embedding_for_are_text(tmp_path, seed):
    folder = write_tiny_model(tmp_path, seed)
    tokenizer = byte_tokenizer()
    plain = tokenizer.encode("<image>").ids
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.warns(UserWarning, match=r"no embedding for \(\['<image>'\]\)"):
        _, _, loaded = load_model(folder)
    assert loaded is not None
    assert (loaded.vocab_size, loaded.encode("<image>")) == (257, plain)


def test_a_broken_tokenizer_is_refused(tmp_path, seed):
    folder = write_tiny_model(tmp_path, seed)
    (folder / "tokenizer.json").write_text('{"model": 1}')
    refused(folder, "tokenizer.json is not a tokenizer that this version of tokenizers reads: ")


def written_tokenizer(folder, **changes):
    described = json.loads(byte_tokenizer().to_str()) | changes
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece", "BPE"])
def test_a_token_id_far_outside_the_vocabulary_is_refused_before_memory_is_taken_for_it(tmp_path, kind):
    model = {"type": kind, "vocab": {"a": 0, "b": 10**9}, "unk_token": "a", "merges": []}
    model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9} if kind == "WordPiece" else {}
    tokenizer = load_tokenizer(written_tokenizer(tmp_path, model=model, added_tokens=[]))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidInput, match=r"^tokenizer\.json has token ids up to 1000000000; vocab_size is 257\.$"):
        tokenizer.within(257)

    # In KiB: the library takes 4 GiB to write such a vocabulary.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


def _replace(old: str | None, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": "."} if old is None else {"String": old}, "content": new}


def _times(count: int, part: dict[str, Any], name: str) -> dict[str, Any]:
    return {"type": "Sequence", name: [part] * count}


_TWICE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [{"Sequence": {"id": each, "type_id": 0}} for each in "AB"],
    "special_tokens": {},
}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    ("name", "at_most", "more"),
    [
        ("normalizer", _times(8, _replace("a", "aa"), "normalizers"), _times(9, _replace("a", "aa"), "normalizers")),
        ("normalizer", _replace("ab", "a" * 512), _replace("ab", "a" * 513)),
        ("normalizer", _replace(None, "a" * 255), _replace(None, "a" * 256)),
        ("pre_tokenizer", _times(4, _BYTES, "pretokenizers"), _times(5, _BYTES, "pretokenizers")),
        ("post_processor", _times(8, _TWICE, "processors"), _times(9, _TWICE, "processors")),
        ("decoder", _times(8, _replace("a", "aa"), "decoders"), _times(9, _replace("a", "aa"), "decoders")),
    ],
    ids=["sequence", "text", "regex", "pre-tokenizer", "template", "decoder"],
)
def test_a_tokenizer_that_lets_a_text_grow_without_bound_is_refused(tmp_path, name, at_most, more):
    load_tokenizer(written_tokenizer(tmp_path, **{name: at_most}))
    message = rf"^tokenizer\.json: {name} lets a text grow; it must become 256 times as long at most\.$"
    with pytest.raises(InvalidInput, match=message):
        load_tokenizer(written_tokenizer(tmp_path, **{name: more}))


def test_a_map_of_characters_counts_by_its_longest_text(tmp_path):
    for longest, is_refused in ((256, False), (257, True)):
        blob = (4).to_bytes(4, "little") + bytes(4) + b"a\0" + b"b" * longest + b"\0"
        normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}
        with pytest.raises(InvalidInput, match="normalizer lets") if is_refused else contextlib.nullcontext():
            load_tokenizer(written_tokenizer(tmp_path, normalizer=normalizer))


def test_truncation_and_padding_of_the_tokenizer_are_switched_off(tmp_path):
    """transformers leaves in the file what the last call asked for; with Fixed 2**32 the process would abort."""
    padding = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    for strategy in ({"Fixed": 64}, {"Fixed": 1 << 32}):
        folder = written_tokenizer(tmp_path, padding=padding | {"strategy": strategy}, truncation=truncation)
        assert len(load_tokenizer(folder).encode("eight...")) == 8


def test_a_panic_while_a_tokenizer_is_read_is_an_error_of_ours(tmp_path):
    folder = written_tokenizer(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": ""})
    with pytest.raises(
        InvalidInput, match=r"^tokenizer\.json is not a tokenizer that this version of tokenizers reads: "
    ):
        load_tokenizer(folder)


def test_a_panic_while_a_text_is_encoded_is_an_error_of_ours(tmp_path):
    tokenizer = load_tokenizer(written_tokenizer(tmp_path, pre_tokenizer={"type": "FixedLength", "length": 0}))
    with pytest.raises(InvalidInput, match=r"^the tokenizer cannot encode the text: chunk size must be non-zero\.$"):
        tokenizer.encode("abc")


@pytest.mark.parametrize("text", ["\ud800", 7, None])
def test_what_is_no_text_cannot_be_encoded(text, tmp_path):
    with pytest.raises(InvalidInput, match=r"^the tokenizer cannot encode the text: "):
        load_tokenizer(written_tokenizer(tmp_path)).encode(text)


@pytest.mark.parametrize("token", [-1, 1 << 40])
def test_an_impossible_token_id_cannot_be_decoded(token, tmp_path):
    with pytest.raises(InvalidInput, match=r"^the tokenizer cannot decode the token ids: "):
        load_tokenizer(written_tokenizer(tmp_path)).decode([token])


def test_an_interrupt_while_a_text_is_encoded_stays_an_interrupt():
    class Interrupted:
        normalizer = None

        def encode(self, *_, **__):
            raise KeyboardInterrupt

    interrupted: Any = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        TextTokenizer(interrupted).encode("abc")


def test_a_snapshot_of_the_hub_is_read(tmp_path, seed):
    written = write_tiny_model(tmp_path / "written", seed)
    cache = tmp_path / "hub" / "models--org--name"
    snapshot = cache / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, file in enumerate(written.iterdir()):
        file.rename(cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    tokenizer = load_model(snapshot)[2]
    assert tokenizer is not None
    assert tokenizer.encode("a") == [load_tokenizer(snapshot).tokenizer.token_to_id("a")]
    (cache / "blobs" / "0").write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"^\w+\.(json|safetensors)|^tokenizer"):
        load_model(snapshot)


def test_a_sentencepiece_folder_is_told_what_to_do(tmp_path, seed):
    folder = write_tiny_model(tmp_path, seed)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    refused(folder, "the folder has tokenizer.model but no tokenizer.json; save it once with", Unsupported)


def test_a_model_can_be_loaded_without_its_tokenizer(tmp_path, seed):
    folder = write_tiny_model(tmp_path, seed)
    (folder / "tokenizer.json").unlink()
    assert load_model(folder, with_tokenizer=False)[2] is None


def test_any_text_survives_the_byte_level_tokenizer(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    text = "tabs\tand\nlines, ünïcode 漢字, emoji 🙂 and \x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 257


def test_a_model_saved_by_transformers_is_read(tmp_path, seed):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = tiny_config()
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=257,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=256,
            rms_norm_eps=1e-5,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    theirs.save_pretrained(tmp_path)
    model, loaded, _ = load_model(tmp_path, with_tokenizer=False)
    assert loaded == config
    tokens = np.arange(20)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(dense_logits(model, tokens), expected, rtol=0, atol=1e-5)


def test_the_written_json_is_plain_and_complete(tmp_path, seed):
    folder = write_tiny_model(tmp_path, seed, dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"
    described = json.loads((folder / "tokenizer_config.json").read_text())
    assert described["eos_token"] == "<|endoftext|>"
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (0, "folder is a Decoder; the order is save_model(folder, model, config)."),
        (1, "model is a ModelConfig; the order is save_model(folder, model, config)."),
        (2, "config is a str; the order is save_model(folder, model, config)."),
    ],
)
def test_an_argument_of_save_model_in_the_place_of_another_is_refused(place, message, tmp_path, seed) -> None:
    config = tiny_config(num_hidden_layers=1)
    model = tiny_model(config, seed)
    arguments: list[Any] = [str(tmp_path / "new"), model, config]
    arguments[place] = [model, config, str(tmp_path)][place]

    with pytest.raises(InvalidInput, match=re.escape(message)):
        save_model(*arguments)

    assert not (tmp_path / "new").exists()
