"""Every family against transformers: the same logits and greedy tokens, and the same tensors when saved again."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from transformers import CONFIG_MAPPING

from jattn.llm.engine import LLM, EngineConfig, SamplingParams
from jattn.llm.load import Family, known_families, load_model, parse_config, register_family, save_model
from jattn.llm.load.config_keys import REQUIRED_FIELDS
from jattn.llm.models import ModelConfig
from jattn.llm.models.config_fields import PARTS
from jattn.llm.testing.torch_side import FirstOfEqual
from tests.support import encoder_decoders
from tests.support.family_models import CASES, LARGER, VARIANTS, reference_logits, write_checkpoint
from tests.support.saved import assert_saved_as_it_was
from tests.support.tiny_models import PagedRun, dense_logits, reference_bound, tiny_config, tiny_model
from torch_core.base.errors import InvalidInput

#: These have tests of their own, in tests/models.
ENCODERS = {
    *(f"{kind}Model" for kind in ("Bert", "Roberta", "XLMRoberta", "ModernBert")),
    "Gemma3TextModel",
    *(f"{kind}ForSequenceClassification" for kind in ("Bert", "Roberta", "XLMRoberta", "ModernBert")),
}
#: Of each family the variant in which most options are on.
LAST = [(architecture, len(variants) - 1) for architecture, (_, variants) in CASES.items()]


#: The families whose layers differ from each other; of the others one layer shows what there is, and compiles sooner.
PATTERNED = ("Qwen2", "Qwen3", "Gemma2", "Gemma3", "Olmo3", "OlmoHybrid", "SmolLM3", "GptOss", "Lfm2", "KimiLinear")
PATTERNED += ("Exaone", "Cohere2", "Llama4", "Bamba", "GraniteMoeHybrid", "Cwm", "Afmoe", "MiniMaxF", "Gemma4")
PATTERNED += (
    "MinistralF",
    "HYV3",
    "Dots1",
    "Mellum",
    "Flint",
    "VaultGemma",
    "GraniteSWA",
    "GraniteMoeSWA",
    "Laguna",
    "MiMo",
    "Bailing",
    "GPTNeoFor",
)
#: The families whose keys, values and masks are those of another one; dense sequences show the rest.
ALIKE = (
    "GraniteF",
    "Olmo2",
    "GlmF",
    "Glm4F",
    "SeedOss",
    "Qwen3Moe",
    "Qwen2Moe",
    "Qwen3_5",
    "Glm4Moe",
    "MiniMaxM2",
    "Ernie",
)
ALIKE += ("HunYuan", "Olmoe", "Phi", "NemotronF", "Apertus", "Arcee", "Helium", "StableLm", "Persimmon", "InternLM")
ALIKE += ("MiniCPM3", "Cwm", "Solar", "Gemma3", "Gemma4", "Cohere2Moe", "Flint", "Mellum", "HYV3", "Dots1", "ExaoneMoe")
ALIKE += ("OPT", "GPTJ", "GPTBigCode", "NanoChat", "OlmoFor", "AXK1")
ALIKE += ("Youtu", "FlexOlmo", "HyperCLOVAX", "Jais2", "VaultGemma", "GraniteMoeF", "GraniteMoeS", "GraniteSWA")
#: Of these every part is tested with another family.
NIGHTLY = ("HYV3", "Dots1", "ExaoneMoe", "Youtu", "FlexOlmo", "HyperCLOVAX", "Jais2", "VaultGemma", "GraniteMoeF")
NIGHTLY += ("Flint", "Mellum", "GraniteMoeS", "GraniteSWA", "MinistralF", "Gemma4Unified", "Lfm3", "Bailing")
NIGHTLY += ("OPT", "GPTJ", "GPTBigCode", "OlmoFor", "GPTNeoFor")


def marked(cases, is_nightly):
    """Returns the cases of a family and a variant, some of them for the night."""
    marks = {True: pytest.mark.nightly, False: ()}
    return [pytest.param(*each, id="-".join(map(str, each)), marks=marks[is_nightly(each)]) for each in cases]


EVERY = marked(LAST, lambda case: case[0].startswith(NIGHTLY))


def test_every_family_of_the_package_is_tested():
    assert set(known_families()) == {*CASES, *encoder_decoders.CASES, *ENCODERS}


#: Defaults that mean the same as those of transformers, or that it derives otherwise, or that every file has.
OTHERWISE = {
    *((family, "sliding_window") for family in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")),
    *((family, "mamba_d_head") for family in ("bamba", "falcon_h1", "granitemoehybrid")),
    *((family, "shared_expert_intermediate_size") for family in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")),
    *(("dots1", name) for name in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")),
    ("bart", "scale_embedding"),
    ("ernie4_5_moe", "moe_layer_end_index"),
    ("flint", "mlp_only_layers"),
    ("laguna", "gating"),
}
FIELDS = {
    f"{part}{field.name}": field.default
    for part, kind in {"": ModelConfig, **{f"{name}.": kind for name, kind in PARTS.items()}}.items()
    for field in fields(kind)
    if field.default is not MISSING and f"{part}{field.name}" not in REQUIRED_FIELDS
}


def has(theirs, ours):
    """Whether a value is one of ours, by the keys that ours names; None says that it is derived."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return all(has({str(name): value for name, value in theirs.items()}.get(key), ours[key]) for key in ours)
    return ours is None or theirs == (list(ours) if isinstance(ours, tuple) else ours)


def test_what_a_file_leaves_out_is_as_transformers_has_it():
    other = set()
    for family in known_families().values():
        config = CONFIG_MAPPING[family.model_type]()
        values = (config.to_dict().get("rope_parameters") or {}) | config.to_dict()
        plain = {name: key.fields[0] for name, key in family.all_keys.items() if key.is_plain}
        of_fields = {name: FIELDS[field] for name, field in plain.items() if field in FIELDS}
        for key, ours in {**of_fields, **family.all_defaults}.items():
            theirs = values.get(config.attribute_map.get(key, key), ...)
            if theirs is not ... and not callable(ours) and not has(theirs, ours):
                other.add((family.model_type, key))
    assert other == OTHERWISE


#: Keys of a file that say something for each layer, and which of transformers' defaults are no whole model here.
OF_LAYERS = {"layer_types", "mlp_layer_types", "layers_block_type", "mlp_only_layers", "no_rope_layers", "moe_layers"}
OF_LAYERS |= {"gating_types", "indexer_types", "layer_rope_theta"}
NO_MODELS = {"bamba", "deepseek_v2", "dots1", "gemma3_text", "glm4_moe", "granitemoehybrid"}
LEFT_OUT = {"bos_token_id", "eos_token_id", "per_layer_config", "time_step_limit"}


def test_a_file_that_lists_no_layers_has_those_of_transformers():
    families = [family for family in known_families().values() if family.model_type not in NO_MODELS]
    for family in families:
        config = CONFIG_MAPPING[family.model_type](architectures=[family.architecture])
        raw = json.loads(config.to_json_string(use_diff=False))
        whole = {name: value for name, value in raw.items() if name not in LEFT_OUT}
        less = {name: value for name, value in whole.items() if name not in OF_LAYERS}
        assert parse_config(less) == parse_config(whole), family.model_type


def paged_logits(model, tokens, cuts):
    """The logits of one sequence whose tokens are fed up to each of the cuts, and one by one from the last on."""
    run, ends = PagedRun(model, num_seqs=1, max_len=40), [*cuts, *range(cuts[-1] + 1, len(tokens) + 1)]
    steps = zip([0, *ends], ends, strict=False)
    return np.concatenate([run.step([tokens[start:end]], num_tokens=16)[0] for start, end in steps])


@pytest.mark.parametrize("sizes", [{}, pytest.param(LARGER, marks=pytest.mark.nightly)], ids=["small", "larger"])
@pytest.mark.parametrize(("architecture", "variant"), EVERY)
def test_whole_sequences_or_chunks_and_decoding_give_the_logits_of_transformers(
    architecture, variant, sizes, tmp_path, seed
):
    layers = 1 + architecture.startswith(PATTERNED)
    folder = write_checkpoint(tmp_path, architecture, variant, seed, **{"num_hidden_layers": layers, **sizes})
    tokens = np.random.default_rng(seed).integers(0, 99, 36)
    exact, same_dtype = reference_logits(folder, tokens[None])
    model, _, _ = load_model(folder, implementation="xla", with_tokenizer=False)
    if architecture.startswith(ALIKE):
        found = dense_logits(model, tokens, padded_to=36)
    else:
        found = paged_logits(model, tokens.astype(np.int32), (16, 25))
    assert np.abs(found - exact[0]).max() <= reference_bound(exact, same_dtype)


@pytest.mark.parametrize(("architecture", "variant"), [("BloomForCausalLM", 1), ("FalconForCausalLM", 1)])
def test_dense_sequences_have_the_same_biases_by_distance(architecture, variant, tmp_path, seed):
    folder = write_checkpoint(tmp_path, architecture, variant, seed, num_hidden_layers=1)
    tokens = np.random.default_rng(seed).integers(0, 99, 24)
    exact, same_dtype = reference_logits(folder, tokens[None])
    model, _, _ = load_model(folder, with_tokenizer=False)
    assert np.abs(dense_logits(model, tokens) - exact[0]).max() <= reference_bound(exact, same_dtype)


@pytest.mark.parametrize(("architecture", "variant"), marked(VARIANTS, lambda case: case not in LAST))
def test_a_checkpoint_is_saved_as_the_tensors_that_it_was(architecture, variant, tmp_path, seed):
    assert_saved_as_it_was(write_checkpoint(tmp_path / "theirs", architecture, variant, seed), tmp_path / "ours")


def assert_greedy_as_transformers(folder, seed, *, max_tokens, implementation="xla"):
    """Two requests whose second reads the first one's blocks, prefilled in chunks; a tie may go either way."""
    model, config, _ = load_model(folder, implementation=implementation, with_tokenizer=False)
    prompt = np.random.default_rng(seed).integers(0, config.vocab_size, 30).tolist()
    # More blocks than a window's: those behind it would be written over before the second request comes.
    sizes = EngineConfig(
        block_size=8, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=30 + max_tokens, num_blocks=48
    )
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(model, config=sizes) as llm:
        first, second = (llm.generate([prompt], params)[0].outputs[0].token_ids for _ in range(2))
        assert llm.engine.cache_stats().hit_tokens > 0
    assert first == second
    assert_best(folder, [prompt], [first])


def assert_best(folder, prompts, texts):
    """Every token of the texts is the best one by transformers, or as good as that within the error of float32."""
    for prompt, text in zip(prompts, texts, strict=True):
        exact, same_dtype = reference_logits(folder, np.asarray([[*prompt, *text]]))
        rows = exact[0, len(prompt) - 1 : -1]
        chosen = rows[np.arange(len(text)), list(text)]
        assert (rows.max(-1) - chosen <= 2 * reference_bound(exact, same_dtype)).all()


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [("GptOssForCausalLM", 0), ("DeepseekV32ForCausalLM", 1)],
)
def test_the_engine_decodes_what_transformers_would(architecture, variant, tmp_path, seed):
    """With sinks, windows on some layers, experts and yarn; over latents, with an indexer's second cache."""
    folder = write_checkpoint(tmp_path, architecture, variant, seed)
    assert_greedy_as_transformers(folder, seed, max_tokens=16)


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [{}, LARGER], ids=["small", "larger"])
@pytest.mark.parametrize(("architecture", "variant"), VARIANTS)
def test_every_variant_in_two_sizes_decodes_what_transformers_would(architecture, variant, sizes, tmp_path, seed):
    folder = write_checkpoint(tmp_path, architecture, variant, seed, **sizes)
    with FirstOfEqual():
        assert_greedy_as_transformers(folder, seed, max_tokens=64)


OWN = Family(
    architecture="OwnForCausalLM",
    model_type="own",
    keys={"layer_norm_eps": "rms_norm_eps"},
    defaults={"layer_norm_eps": 1e-5},
    options={"norm_type": "layer_norm", "norm_placement": "both", "hidden_act": "relu2", "gated_mlp": False},
    names={"self_attn.qkv_proj": "self_attn.fused", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"},
)


@pytest.fixture
def own_family(monkeypatch):
    monkeypatch.setattr("jattn.llm.load.families.registry._FAMILIES", known_families())
    register_family(OWN)


def test_a_family_of_ones_own_is_saved_and_loaded(own_family, tmp_path, seed):
    config = tiny_config(**OWN.options, architecture="OwnForCausalLM")
    model = tiny_model(config, seed)
    save_model(tmp_path, model, config)
    loaded, loaded_config, _ = load_model(tmp_path, with_tokenizer=False)
    assert loaded_config == config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), nnx.state(model))
    names = safetensors.numpy.load((tmp_path / "model.safetensors").read_bytes()).keys()
    assert {"model.layers.0.self_attn.fused.weight", "model.layers.0.mlp.up.weight"} <= names


def test_a_family_that_is_known_cannot_be_registered_again(own_family):
    with pytest.raises(InvalidInput, match=r"^family\.architecture is 'OwnForCausalLM', which is known already\.$"):
        register_family(OWN)


def test_what_is_no_family_cannot_be_registered():
    family: Any = {"architecture": "x"}
    with pytest.raises(InvalidInput, match=r"it must be a jattn\.llm\.load\.Family\.$"):
        register_family(family)


@pytest.mark.parametrize("field", ["names_of", "norms_without_weights"])
def test_a_family_whose_function_of_the_config_is_a_value_is_refused_before_others_need_it(own_family, field):
    changes: dict[str, Any] = {"architecture": "OtherForCausalLM", field: True}
    with pytest.raises(InvalidInput, match=rf"^family\.{field} is True; it must be a function of the config\.$"):
        register_family(replace(OWN, **changes))
    assert "OtherForCausalLM" not in known_families()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_local_experts": 10**9},
        {"num_experts_per_tok": 0},
        {"sliding_window": -1},
        {"layer_types": "full_attention"},
        {"num_hidden_layers": 2.5},
        {"rope_scaling": {"rope_type": "yarn", "factor": []}},
        {"head_dim": 10**9},
    ],
    ids=str,
)
def test_an_absurd_config_is_refused_without_allocating(changes, tmp_path, seed):
    folder = write_checkpoint(tmp_path, "GptOssForCausalLM", 0, seed)
    raw = json.loads((folder / "config.json").read_text())
    dropped = ("rope_parameters",) if "rope_scaling" in changes else ()
    raw = {key: value for key, value in (raw | changes).items() if key not in dropped}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InvalidInput, match=r"^config\.json: "):
        load_model(folder, with_tokenizer=False)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("GPT2LMHeadModel", "n_embd", 0),
        ("FalconForCausalLM", "ffn_hidden_size", 10**9),
        ("MixtralForCausalLM", "num_local_experts", 10**9),
        ("Qwen3MoeForCausalLM", "moe_intermediate_size", -1),
        ("DeepseekV3ForCausalLM", "n_routed_experts", 0),
        ("CohereForCausalLM", "layer_norm_eps", -1),
    ],
)
def test_a_value_that_cannot_be_is_named_as_the_file_does(architecture, key, value, tmp_path, seed):
    folder = write_checkpoint(tmp_path, architecture, 0, seed)
    raw = json.loads((folder / "config.json").read_text())
    with pytest.raises(InvalidInput, match=rf"^config\.json: {key} is {value}; it must be from "):
        parse_config({**raw, key: value})


def test_a_config_of_millions_of_experts_is_refused_before_they_are_named(tmp_path, seed):
    folder = write_checkpoint(tmp_path, "Qwen3MoeForCausalLM", 0, seed)
    raw = json.loads((folder / "config.json").read_text())
    many = {"num_experts": 4096, "num_hidden_layers": 512, "layer_types": None}
    (folder / "config.json").write_text(json.dumps({**raw, **many, "num_local_experts": None}))
    with pytest.raises(InvalidInput, match=r"^the config asks for 20\d{5} tensors or more; the weights have 41\.$"):
        load_model(folder, with_tokenizer=False)


def test_a_decoder_whose_files_leave_model_out_is_read(tmp_path, seed):
    folder = write_checkpoint(tmp_path, "Qwen3ForCausalLM", 0, seed, tie_word_embeddings=True)
    expected = load_model(folder, with_tokenizer=False)[0]
    tensors = safetensors.numpy.load((folder / "model.safetensors").read_bytes())
    tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    found = load_model(folder, with_tokenizer=False)[0]
    jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(expected))


def with_norms(folder: Path, **values: float) -> None:
    """Adds tensors of norms to a folder of Galactica, whose norms have none."""
    file, width = folder / "model.safetensors", json.loads((folder / "config.json").read_text())["hidden_size"]
    tensors = safetensors.numpy.load(file.read_bytes())
    layers = {name.rpartition(".fc1")[0] for name in tensors if ".fc1" in name}
    for norm in ("model.decoder.final_layer_norm", *(f"{layer}.self_attn_layer_norm" for layer in layers)):
        tensors |= {f"{norm}.{name}": np.full(width, value, np.float32) for name, value in values.items()}
    file.write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))


def test_norms_without_parameters_that_are_stored_as_ones_and_zeros_are_read(tmp_path, seed):
    folder = write_checkpoint(tmp_path, "OPTForCausalLM", 2, seed)
    expected = load_model(folder, with_tokenizer=False)[0]
    with_norms(folder, weight=1.0, bias=0.0)
    found = load_model(folder, with_tokenizer=False)[0]
    jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(expected))


@pytest.mark.parametrize(
    ("values", "wrong"), [({"weight": 1.5}, "weight' is not 1"), ({"bias": 0.5}, "bias' is not 0")]
)
def test_norms_without_parameters_that_are_stored_with_other_numbers_are_refused(values, wrong, tmp_path, seed):
    folder = write_checkpoint(tmp_path, "OPTForCausalLM", 2, seed)
    with_norms(folder, **values)
    with pytest.raises(
        InvalidInput, match=rf"_layer_norm\.{wrong} everywhere; the config says that norms have no param"
    ):
        load_model(folder, with_tokenizer=False)


def test_files_of_a_hub_that_leave_the_prefix_out_are_read(tmp_path, seed):
    """GPT-2's first files have no "transformer." and keep their masks beside the weights."""
    folder = write_checkpoint(tmp_path, "GPT2LMHeadModel", 0, seed)
    expected = load_model(folder, with_tokenizer=False)[0]
    tensors = safetensors.numpy.load((folder / "model.safetensors").read_bytes())
    tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    tensors["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    found = load_model(folder, with_tokenizer=False)[0]
    jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(expected))
