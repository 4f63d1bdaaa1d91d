"""Weights against the config: single file, shards, and every way in which they can disagree."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jattn.llm.engine import KVCacheScales
from jattn.llm.load import load_model, parse_config
from jattn.llm.load.folder import check_folder, read_object
from jattn.llm.load.plan import plan_parameters
from jattn.llm.load.weights import find_weights, read_parameter
from jattn.llm.models import Decoder
from tests.support.family_models import write_checkpoint
from tests.support.tiny_models import tiny_config, write_tiny_model
from torch_core.base.errors import InvalidInput, Unsupported

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path, seed):
    return write_tiny_model(tmp_path, seed)


def tensors_of(folder):
    return safetensors.numpy.load((folder / "model.safetensors").read_bytes())


def write_tensors(folder, tensors, name="model.safetensors"):
    (folder / name).write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))


def shard(folder, split_at=5):
    """Replaces the single file by two shards and an index; returns the index for a test to change."""
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:split_at], "b.safetensors": names[split_at:]}
    for part, held in parts.items():
        write_tensors(folder, {name: tensors[name] for name in held}, part)
    index = {"metadata": {"total_size": 0}, "weight_map": {name: part for part, held in parts.items() for name in held}}
    write_index(folder, index)
    return index


def write_index(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def refused(folder, message):
    with pytest.raises(InvalidInput, match="^" + re.escape(message)):
        load_model(folder)


def test_the_plan_names_exactly_the_parameters_of_the_model():
    for changes in ({}, {"tie_word_embeddings": True}, {"attention_bias": True}):
        config = tiny_config(**changes)
        model = nnx.eval_shape(lambda config=config: Decoder(config, rngs=nnx.Rngs(0)))
        built = {path: variable.shape for path, variable in nnx.to_flat_state(nnx.state(model))}
        assert {parameter.path: parameter.shape for parameter in plan_parameters(config)} == built


def test_shards_give_the_same_model_as_one_file(folder):
    single, _, _ = load_model(folder)
    shard(folder)
    sharded, _, _ = load_model(folder)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(single), nnx.state(sharded))


def test_a_missing_tensor_is_named(folder):
    tensors = tensors_of(folder)
    del tensors[QUERY]
    write_tensors(folder, tensors)
    refused(folder, f"the weights lack '{QUERY}' (64, 48); the config asks for 21 tensors.")


def test_many_missing_tensors_are_counted(folder):
    write_tensors(folder, {"model.norm.weight": np.ones(48, np.float32)})
    with pytest.raises(InvalidInput, match=r" and 17 more; the config asks for 21 tensors\.$"):
        load_model(folder)


def test_an_extra_tensor_is_named(folder):
    write_tensors(folder, tensors_of(folder) | {"model.extra": np.ones(3, np.float32)})
    refused(folder, "the weights have 'model.extra', which the config does not ask for.")


def test_scales_of_an_fp8_cache_are_read_under_all_their_names(folder):
    scales = {
        "model.layers.0.self_attn.k_scale": np.full(1, 0.5, np.float32),
        "model.layers.0.self_attn.attn.v_scale": np.full((), 0.25, np.float32),
        "model.layers.1.self_attn.k_proj.k_scale": np.full(1, 2, np.float32),
        "model.layers.1.self_attn.v_proj.v_scale": np.full(1, 4, np.float32),
    }
    write_tensors(folder, tensors_of(folder) | scales)

    model, *_ = load_model(folder)
    carried = KVCacheScales.carried_by(model)

    # e4m3's largest number is worth 448 units.
    assert carried is not None
    assert [*carried.ranges.values()] == [(224, 112), (896, 1792)]


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("0.self_attn.k_scale", [0.5], "layer 0 has a scale of its k cache alone; it must have k and v."),
        ("9.self_attn.k_scale", [0.5], "there is a k_scale or v_scale of layer 9; the model has 2."),
        (
            "0.self_attn.k_scale",
            [0.5, 1.0],
            "model.safetensors: tensor 'model.layers.0.self_attn.k_scale' must be one finite number above 0.",
        ),
    ],
)
def test_a_scale_that_cannot_be_is_refused(folder, name, scale, message):
    write_tensors(folder, tensors_of(folder) | {f"model.layers.{name}": np.array(scale, np.float32)})
    refused(folder, message)


@pytest.fixture
def tied(tmp_path, seed):
    return write_tiny_model(tmp_path, seed, tie_word_embeddings=True)


EMBEDDING = "model.embed_tokens.weight"


def test_a_head_that_is_the_tied_embedding_again_changes_nothing(tied):
    tensors, (before, _, _) = tensors_of(tied), load_model(tied)
    write_tensors(tied, tensors | {"lm_head.weight": tensors[EMBEDDING].copy()})
    after, _, _ = load_model(tied)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(after)), nnx.to_pure_dict(nnx.state(before)))


def test_a_tied_embedding_that_is_stored_as_the_head_alone_is_read(tied):
    tensors, (before, _, _) = tensors_of(tied), load_model(tied)
    write_tensors(tied, {"lm_head.weight": tensors.pop(EMBEDDING), **tensors})
    after, _, _ = load_model(tied)
    np.testing.assert_array_equal(after.embed_tokens.embedding[...], before.embed_tokens.embedding[...])


@pytest.mark.parametrize("head", ["other values", "another shape"])
def test_a_head_that_differs_from_the_tied_embedding_is_refused(head, tied):
    tensors = tensors_of(tied)
    changed = tensors[EMBEDDING] + 1 if head == "other values" else tensors[EMBEDDING][:-1].copy()
    write_tensors(tied, tensors | {"lm_head.weight": changed})
    refused(
        tied,
        "the weights have 'lm_head.weight', which is not 'model.embed_tokens.weight', and tie_word_embeddings is true; "
        "hf_overrides={'tie_word_embeddings': False} takes both, or take 'lm_head.weight' out of the weights.",
    )


@pytest.mark.parametrize("dtype", [np.int64, np.bool_])
def test_a_buffer_of_a_type_that_weights_do_not_have_is_passed_over(dtype, tmp_path, seed):
    folder = write_checkpoint(tmp_path, "GPTNeoXForCausalLM", 0, seed, num_hidden_layers=1)
    buffer = {"gpt_neox.layers.0.attention.bias": np.ones((1, 1, 8, 8), dtype)}
    write_tensors(folder, tensors_of(folder) | buffer)
    load_model(folder, with_tokenizer=False)


def test_a_weight_of_a_type_that_is_not_read_is_named(folder):
    tensors = tensors_of(folder)
    write_tensors(folder, tensors | {QUERY: tensors[QUERY].astype(np.float64)})
    with pytest.raises(
        Unsupported, match=f"^model.safetensors: tensor '{QUERY}' has dtype 'F64'; weights may be F32, "
    ):
        load_model(folder)


def test_rotary_buffers_of_old_writers_are_ignored(folder):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    write_tensors(folder, tensors_of(folder) | buffer)
    load_model(folder)


def test_a_wrong_shape_is_named_with_the_shape_that_is_asked_for(folder):
    tensors = tensors_of(folder)
    write_tensors(folder, tensors | {QUERY: np.ascontiguousarray(tensors[QUERY].T)})
    refused(folder, f"model.safetensors: tensor '{QUERY}' has shape (48, 64); the config asks for (64, 48).")


def test_a_folder_of_pickles_is_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    refused(folder, "the folder has pickled weights only (pytorch_model.bin); reading a pickle can run code.")


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "the folder has neither model.safetensors nor model.safetensors.index.json.")


def test_a_single_file_beside_an_index_is_refused(folder):
    write_index(folder, {"weight_map": {}})
    refused(
        folder,
        "the folder has both model.safetensors and model.safetensors.index.json, which names other files; keep one.",
    )


def test_an_index_of_the_single_file_changes_nothing(folder):
    write_index(folder, {"metadata": {}, "weight_map": dict.fromkeys(tensors_of(folder), "model.safetensors")})
    load_model(folder)


INDEX = "model.safetensors.index.json"
BAD_INDEXES = [
    ({"weight_map": []}, f"{INDEX} must have weight_map and may have metadata, nothing else."),
    ({"weight_map": {}, "code": 1}, f"{INDEX} must have weight_map and may have metadata, nothing else."),
    ({"weight_map": {"x": 1}}, f"{INDEX}: weight_map must map tensor names to file names."),
    ({"weight_map": {"x": "pytorch_model.bin"}}, f"{INDEX} names 'pytorch_model.bin'; reading a pickle can run code."),
    ({"weight_map": {"x": "weights.txt"}}, f"{INDEX} names 'weights.txt'; shards end in .safetensors."),
    ({"weight_map": {"x": "../a.safetensors"}}, "file name '../a.safetensors' is not a plain name inside the model"),
    ({"weight_map": {"x": "c.safetensors"}}, f"{INDEX} names 'c.safetensors', which is not in the folder."),
    ({"weight_map": {str(i): f"{i}.safetensors" for i in range(1001)}}, f"{INDEX} names 1001 files; at most 1000"),
]


@pytest.mark.parametrize(("index", "message"), BAD_INDEXES, ids=[message[:70] for _, message in BAD_INDEXES])
def test_a_bad_index_is_refused(index, message, folder):
    shard(folder)
    write_index(folder, index)
    refused(folder, message)


def test_a_tensor_that_the_index_places_elsewhere_is_refused(folder):
    index = shard(folder)
    index["weight_map"]["lm_head.weight"] = "b.safetensors"
    write_index(folder, index)
    refused(folder, "a.safetensors holds tensor 'lm_head.weight', but model.safetensors.index.json does not place it")


def test_a_tensor_that_no_shard_holds_is_refused(folder):
    index = shard(folder)
    index["weight_map"]["ghost"] = "b.safetensors"
    write_index(folder, index)
    refused(folder, f"{INDEX} places 'ghost' in a file that does not hold it.")


def test_a_tensor_in_two_shards_is_refused(folder):
    tensors = tensors_of(folder)
    shard(folder)
    write_tensors(folder, tensors, "b.safetensors")
    refused(folder, "tensor 'lm_head.weight' is in both a.safetensors and b.safetensors.")


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [("CohereForCausalLM", {}), ("MixtralForCausalLM", {"num_local_experts": 2}), ("GptOssForCausalLM", {})],
)
def test_parameters_are_made_on_a_device_as_on_the_host(architecture, sizes, tmp_path, seed):
    folder = check_folder(write_checkpoint(tmp_path, architecture, 0, seed, num_hidden_layers=1, **sizes))
    plan, tensors = plan_parameters(parse_config(read_object(folder, "config.json"))), find_weights(folder)
    for parameter in plan:
        host, device = (
            read_parameter(tensors, parameter, jnp.dtype("bfloat16"), on_host=on_host) for on_host in (True, False)
        )
        assert (device.shape, device.dtype) == (parameter.shape, "bfloat16")
        np.testing.assert_array_equal(host, device)


def test_nothing_is_read_from_the_files_before_all_checks_have_passed(folder, monkeypatch):
    monkeypatch.setattr("jattn.llm.load.model.read_parameter", lambda *_, **__: pytest.fail("a tensor was read"))
    (folder / "tokenizer.json").unlink()
    refused(folder, "the folder has no tokenizer.json; load_model(folder, with_tokenizer=False) reads the model alone")
