"""config.json: what is read, what is ignored by name, and how everything else is refused."""

from __future__ import annotations

import json
import re

import pytest

from jattn.llm.load import parse_config, render_config
from jattn.llm.models import RopeScaling
from tests.support import encoder_decoders, family_models
from tests.support.tiny_models import tiny_config
from torch_core.base.errors import InvalidInput, Unsupported

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
BY_KIND = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}
#: Files of other families by architecture: the keys that they have and LLAMA has not, or in place of its own.
OTHERS = {
    "MellumForCausalLM": {"model_type": "mellum", **EXPERTS, "num_experts": 6},
    "LagunaForCausalLM": {"model_type": "laguna", **EXPERTS, "num_experts": 6, "num_key_value_heads": 4},
    "GraniteSWAForCausalLM": {"model_type": "granite_swa"},
    "ExaoneMoeForCausalLM": {"model_type": "exaone_moe", **EXPERTS},
    "MiniMaxForCausalLM": {"model_type": "minimax"},
    "MiMoV2FlashForCausalLM": {"model_type": "mimo_v2_flash", "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1]},
    "BailingHybridForCausalLM": {
        "model_type": "bailing_hybrid",
        "model_max_length": 512,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
    },
}
REFUSED = [
    ({"architectures": None}, InvalidInput, "config.json: architectures is None; it must be a list of one name."),
    ({"architectures": ["A", "B"]}, InvalidInput, "architectures is ['A', 'B']; it must be a list of one name."),
    (
        # A Llama by its keys; it rotates neighbours, as a Llama does not.
        {"architectures": ["JambaForCausalLM"]},
        Unsupported,
        (
            "architectures[0] is 'JambaForCausalLM'; this build has those of jattn.llm.load.known_families(), and "
            "jattn.llm.load.register_family adds another."
        ),
    ),
    ({"model_type": "qwen2"}, InvalidInput, "model_type is 'qwen2'; LlamaForCausalLM needs 'llama'."),
    ({"auto_map": {}}, Unsupported, "config.json has auto_map; code from a model folder is never run."),
    ({"use_mrope": True}, Unsupported, "config.json: use_mrope is True; this build has false."),
    ({"rope_interleaved": True}, Unsupported, "config.json: rope_interleaved is True; this build has false."),
    ({"partial_rotary_factor": 0.5}, Unsupported, "config.json: partial_rotary_factor is 0.5; this build has 1.0."),
    ({"partial_rotary_factor": True}, Unsupported, "config.json: partial_rotary_factor is True; this build has 1.0."),
    ({"is_encoder_decoder": True}, Unsupported, "config.json: is_encoder_decoder is True; this build has false."),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        Unsupported,
        "config.json: partial_rotary_factor is 0.5; this build has 1.0.",
    ),
    (
        {"rope_theta": 10**400},
        InvalidInput,
        "config.json: rope_theta is an int of 1329 bits; it must be from 1 to 1e+12.",
    ),
    (
        {"rope_scaling": LLAMA3_ROPE | {"factor": 10**400}},
        InvalidInput,
        "config.json: rope_scaling.factor is an int of 1329 bits; it must be from 1 to 1e+06.",
    ),
    (
        {"hidden_size": 10**4000, "head_dim": 16},
        InvalidInput,
        "config.json: hidden_size is an int of 13288 bits; it must be from 1 to 65536.",
    ),
    (
        {"quantization_config": {"quant_method": "hqq"}},
        Unsupported,
        "config.json: quantization_config.quant_method is 'hqq'; this build reads fp8, mxfp4, compressed-tensors, ",
    ),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        Unsupported,
        "config.json: quantization_config.weight_block_size is [64, 64]; this build reads [128, 128], or one scale",
    ),
    (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}},
        Unsupported,
        "config.json: quantization_config.format is 'marlin-24'; this build reads float-quantized, pack-quan",
    ),
    ({"hidden_act": "tanh"}, Unsupported, "config.json: hidden_act is 'tanh'; this build has silu, gelu, gelu_new, "),
    (
        {"num_hidden_layers": 10**9},
        InvalidInput,
        "config.json: num_hidden_layers is 1000000000; it must be from 1 to 512.",
    ),
    (
        {"num_attention_heads": 4.0},
        InvalidInput,
        "config.json: num_attention_heads is 4.0; it must be an int from 1 to 1024.",
    ),
    (
        {"hidden_size": 66},
        InvalidInput,
        "hidden_size is 66, not a multiple of num_attention_heads (4); give head_dim explicitly.",
    ),
    ({"head_dim": 15}, InvalidInput, "config.json: head_dim is 15; rotary embeddings need an even number."),
    ({"rope_scaling": [2]}, InvalidInput, "config.json: rope_scaling is [2]; it must be an object or null."),
    (
        {"rope_scaling": {"rope_type": "cubic"}},
        Unsupported,
        "rope_scaling.rope_type is 'cubic'; this build has default, linear, dynamic, llama3, yarn, longrope",
    ),
    (
        {"rope_scaling": {"rope_type": "yarn"}},
        InvalidInput,
        (
            "config.json: rope_scaling of type 'yarn' has the keys ['original_max_position_embeddings']; it needs "
            "['factor', 'original_max_position_embeddings'] and may have ['attention_factor', 'beta_fast', "
            "'beta_slow', 'mscale', 'mscale_all_dim', 'truncate']."
        ),
    ),
    (
        {"rope_scaling": {"type": "linear"}},
        InvalidInput,
        "rope_scaling of type 'linear' has the keys []; it needs ['factor'].",
    ),
    (
        {"rope_scaling": {"type": "linear", "factor": "2"}},
        InvalidInput,
        "config.json: rope_scaling.factor is '2'; it must be a finite number from 1 to 1e+06.",
    ),
    (
        {"rope_scaling": {**LLAMA3_ROPE}, "rope_parameters": {**LLAMA3_ROPE}},
        InvalidInput,
        "config.json: both rope_scaling and rope_parameters are given; keep one.",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        InvalidInput,
        "rope_parameters of type 'default' has the keys ['full_attention']; it needs [].",
    ),
    (
        {"torch_dtype": "int8"},
        Unsupported,
        "config.json: torch_dtype is 'int8'; it must be one of float32, bfloat16, float16.",
    ),
    ({"torch_dtype": "float16", "dtype": "bfloat16"}, InvalidInput, "config.json: torch_dtype and dtype differ"),
    ({"sliding_window": 128}, Unsupported, "config.json: sliding_window is 128; LlamaForCausalLM has no windows."),
    ({"use_sliding_window": True}, Unsupported, "use_sliding_window is True; LlamaForCausalLM has no windows."),
    (
        {"layer_types": ["sliding_attention"] * 2},
        Unsupported,
        "layer_types is ['sliding_attention', 'sliding_attention']; LlamaForCausalLM has no windows.",
    ),
    (
        {"layer_types": ["full_attention"]},
        InvalidInput,
        (
            "layer_types is ['full_attention']; it must have 'full_attention' or 'sliding_attention' for each of the 2 "
            "layers."
        ),
    ),
    (
        {"eos_token_id": "</s>"},
        InvalidInput,
        "config.json: eos_token_id is '</s>'; it must be a token id, a list of at most 64, or null.",
    ),
    (
        {"eos_token_id": [1, 256]},
        InvalidInput,
        "config.json: eos_token_ids[1] is 256; it must be a token id from 0 to 255.",
    ),
    (
        {"tie_word_embeddings": None},
        InvalidInput,
        "config.json: tie_word_embeddings is None; it must be true or false.",
    ),
    (
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "mlp_bias": True},
        Unsupported,
        "config.json: mlp_bias is True; this build has false.",
    ),
    ({"attention_bias": "yes"}, InvalidInput, "config.json: attention_bias is 'yes'; it must be true or false."),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=[str(changes)[:60] for changes, *_ in REFUSED])
def test_a_wrong_value_is_refused_with_the_key_the_value_and_the_limit(changes, error, message):
    with pytest.raises(error, match=re.escape(message) + ("$" if message.endswith(".") else "")):
        parse_config(LLAMA | changes)


def test_an_unknown_key_is_named_with_the_override_that_leaves_it_out_and_no_more():
    message = "config.json has the unknown key 'zeta'; hf_overrides={'zeta': None} loads without it, if "
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}the model is the same without\\.$"):
        parse_config(LLAMA | {"zeta": 1})
    with pytest.raises(InvalidInput, match=r"^config\.json has the unknown key 'residual_multiplier' and 1 more; "):
        parse_config(LLAMA | {"zeta": 1, "residual_multiplier": 2.0})


def test_keys_that_begin_with_an_underscore_are_ignored_but_for_those_that_a_family_reads():
    notes = {"_model_name_or_path": "x", "_attn_implementation": "sdpa", "_commit_hash": "0", "_diffusers": [1]}
    assert parse_config(LLAMA | notes | {"_sliding_window_pattern": 6}) == parse_config(LLAMA)


def test_missing_keys_are_named():
    with pytest.raises(InvalidInput, match=r"^config\.json lacks hidden_size, num_hidden_layers\.$"):
        parse_config({key: value for key, value in LLAMA.items() if key not in ("hidden_size", "num_hidden_layers")})


def test_harmless_keys_of_hugging_face_are_ignored():
    harmless = {"use_cache": True, "transformers_version": "4.51.0", "initializer_range": 0.02, "pretraining_tp": 1}
    assert parse_config(LLAMA | harmless) == parse_config(LLAMA)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_mrope": False},
        {"is_llama_config": True},
        {"rope_interleaved": False},
        {"unsloth_fixed": True},
        {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
        {"partial_rotary_factor": 1.0},
        {"partial_rotary_factor": 1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
        {"rope_scaling": {"rope_type": "default", "factor": None}},
        {"auto_map": None, "quantization_config": None, "a_key_of_tomorrow": None},
        {"is_encoder_decoder": False, "is_decoder": True, "chunk_size_feed_forward": 0, "tokenizer_class": "A"},
    ],
    ids=str,
)
def test_a_key_whose_value_changes_nothing_passes(changes):
    assert parse_config(LLAMA | changes) == parse_config(LLAMA)


#: What files of the hub have beside the keys that transformers reads.
PUBLISHED = {
    "LlamaForCausalLM": {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}, "max_sequence_length": 2048}
    | {"activation": "swiglu", "custom_pipelines": {}, "temperature": 0.7},
    "GemmaForCausalLM": {"hidden_activation": "gelu_pytorch_tanh"},
    "Gemma2ForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "Gemma3ForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "Starcoder2ForCausalLM": {"activation_function": "gelu", "layer_norm_epsilon": 1e-5, "norm_type": "layer_norm"}
    | {"mlp_type": "default", "scale_attn_weights": True, "scale_attention_softmax_in_fp32": True},
    "CohereForCausalLM": {"model_max_length": 131072},
    "Qwen3MoeForCausalLM": {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    "Phi3ForCausalLM": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    "GPT2LMHeadModel": {"n_special": 0, "predict_special_tokens": True},
    "FalconForCausalLM": {"ff_factor": 4},
    "OPTForCausalLM": {"output_projection": True, "learned_embeddings": True, "scale_embeddings": False},
    "BartForConditionalGeneration": {"num_hidden_layers": 12},
}


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_keys_of_published_files_that_transformers_does_not_read_change_nothing(architecture):
    raw = written_by_transformers(architecture)
    assert parse_config(raw | PUBLISHED[architecture]) == parse_config(raw)


def test_code_beside_the_weights_of_a_family_that_is_known_is_not_run_and_not_refused():
    phi = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    assert parse_config(phi | {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}) == parse_config(phi)


def test_absent_options_take_the_defaults_of_hugging_face():
    config = parse_config(LLAMA)
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (16, 4, 1e-6)
    assert (config.rope_theta, config.rope_scaling, config.tie_word_embeddings) == (10000.0, None, False)
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == ("float32", None, ())


def test_the_old_and_the_new_spelling_of_rope_options_mean_the_same():
    old = parse_config(LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE})
    assert parse_config(LLAMA | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}}) == old
    assert old.rope_scaling == RopeScaling(**LLAMA3_ROPE)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=str,
)
def test_a_first_context_beside_the_rope_options_wins(scaling):
    first = "original_max_position_embeddings"
    beside = parse_config(LLAMA | {"rope_scaling": scaling, first: 32})
    assert beside == parse_config(LLAMA | {"rope_scaling": scaling | {first: 32}})


def test_the_legacy_name_of_the_rope_type_is_read():
    config = parse_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert config.rope_scaling == RopeScaling(rope_type="linear", factor=2)


def test_a_llama_bias_covers_all_four_projections_and_a_qwen2_bias_three():
    llama = parse_config(LLAMA | {"attention_bias": True})
    qwen2 = parse_config(LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
    assert (llama.attention_bias, llama.attention_output_bias) == (True, True)
    assert (qwen2.attention_bias, qwen2.attention_output_bias) == (True, False)


def test_a_mistral_window_is_read():
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128}
    assert parse_config(LLAMA | mistral).sliding_window == 128
    assert parse_config(LLAMA | mistral | {"sliding_window": None}).sliding_window is None


def test_a_mistral_without_a_word_on_windows_has_the_one_of_hugging_face():
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert parse_config(LLAMA | mistral).sliding_window == 4096


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": RopeScaling(**LLAMA3_ROPE)},
        {"attention_bias": True},
        {"attention_bias": True, "attention_output_bias": True},
        {"mlp_bias": True, "tie_word_embeddings": True},
        {"sliding_window": 9, "head_dim": 32},
        {"attention_bias": True, "layer_windows": (None, 9)},
        {"logits_scale": 1 / 6, "residual_multiplier": 0.22},
        {"position_embedding": "learned", "norm_type": "layer_norm", "norm_bias": True, "gated_mlp": False}
        | {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "num_key_value_heads": 4}
        | {"head_dim": 12},
        {"eos_token_ids": (1, 2), "bos_token_id": None},
    ],
    ids=str,
)
def test_a_rendered_config_parses_to_itself(changes):
    config = tiny_config(dtype="bfloat16", **changes)
    assert parse_config(render_config(config, dtype="bfloat16")) == config


def test_a_combination_without_an_architecture_cannot_be_rendered():
    with pytest.raises(Unsupported, match=r"^config has value_norm=True; no supported architecture stores that\.$"):
        render_config(tiny_config(value_norm=True), dtype="float32")


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": ...}, "config.json lacks moe_intermediate_size."),
        ("GptOssForCausalLM", {"num_experts_per_tok": ...}, "config.json lacks num_experts_per_tok."),
        (
            "Qwen3MoeForCausalLM",
            {"mlp_only_layers": 0.5},
            "config.json: mlp_only_layers is 0.5; it must be a list of whole numbers, or null.",
        ),
        (
            "SmolLM3ForCausalLM",
            {"no_rope_layer_interval": ""},
            "config.json: no_rope_layer_interval is ''; it must be an int from 1 to 512.",
        ),
        ("FalconForCausalLM", {"n_layer": 7}, "config.json: n_layer is 7; num_hidden_layers is 2. Leave one out."),
        ("FalconForCausalLM", {"alibi": "no"}, "config.json: alibi is 'no'; it must be true or false."),
        ("LlamaForCausalLM", {"attention_bias": "x" * 10**5}, "; it must be true or false."),
        ("T5ForConditionalGeneration", {"feed_forward_proj": []}, "config.json: of the encoder, hidden_act is []; "),
        ("T5ForConditionalGeneration", {"num_layers": ...}, "config.json lacks num_layers."),
        (
            "BartForConditionalGeneration",
            {"encoder_attention_heads": 8},
            "config.json: encoder_attention_heads is 8 and the decoder's 4; this build has the same in both.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(("LM", "Generation")) else "",
)
def test_a_wrong_value_of_a_family_is_named_with_what_it_must_be(architecture, changes, message):
    raw = written_by_transformers(architecture)
    raw = {key: value for key, value in (raw | changes).items() if value is not ...}
    with pytest.raises((InvalidInput, Unsupported), match=re.escape(message)) as caught:
        parse_config(raw)
    assert len(str(caught.value)) < 500


def written_by_transformers(architecture):
    transformers = pytest.importorskip("transformers")
    name, variants = (family_models.CASES | encoder_decoders.CASES)[architecture]
    sizes = {} if architecture in encoder_decoders.CASES else family_models.SIZES
    left_out = ("no_rope_layer_interval", *family_models.ABSENT.get(architecture, ()))
    options = {key: value for key, value in (sizes | variants[0]).items() if key not in left_out}
    config = getattr(transformers, name)(**options)
    return json.loads(config.to_json_string()) | {"architectures": [architecture], "no_rope_layers": None}


def test_a_list_of_one_forced_last_token_is_that_token():
    assert parse_config({**LLAMA, "forced_eos_token_id": [5]}).forced_eos_token_id == 5


def test_of_several_forced_last_tokens_none_is_served_and_the_key_is_named():
    named = r"^config\.json has forced_eos_token_id, whose effect is missing here\.$"
    with pytest.warns(UserWarning, match=named):
        assert parse_config({**LLAMA, "forced_eos_token_id": [5, 6]}).forced_eos_token_id is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is "),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; this build has null"),
        ({"per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config is "),
        ({"per_layer_config": {"1": {"head_dim": 16, "hidden_size": 2}}}, "per_layer_config is "),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2; layer 0 has the window 512"),
        ({"enable_moe_block": True}, "moe_intermediate_size is None"),
    ],
    ids=str,
)
def test_a_gemma_4_that_computes_otherwise_is_refused(changes, message) -> None:
    raw = {
        "architectures": ["Gemma4ForCausalLM"], "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    assert parse_config(raw).of_layer(1).head_dim == 512
    with pytest.raises((InvalidInput, Unsupported)) as error:
        parse_config(raw | changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "key", "value", "message"),
    [
        (
            "MellumForCausalLM",
            "rope_parameters",
            BY_KIND | {"full_attention": "x"},
            "rope_parameters.full_attention is 'x'",
        ),
        (
            "MellumForCausalLM",
            "rope_parameters",
            {"full_attention": {}},
            "rope_parameters.sliding_attention.rope_theta is missing",
        ),
        (
            "MellumForCausalLM",
            "rope_parameters",
            BY_KIND | {"sliding_attention": {"rope_theta": 0}},
            "rope_parameters.sliding_attention.rope_theta is 0; it must be from 1 to",
        ),
        (
            "MellumForCausalLM",
            "rope_parameters",
            BY_KIND | {"sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rope_parameters.sliding_attention is {'rope_theta': 10000.0, 'partial_rotary_factor': 0.5}; this",
        ),
        ("MellumForCausalLM", "sliding_window", "x", "sliding_window is 'x'; it must be an int from 1 to"),
        ("LagunaForCausalLM", "layer_types", [{}, {}], "layer_types is [{}, {}]; it must have 'full_attention'"),
        ("LagunaForCausalLM", "gating_types", 3, "gating_types is 3; its values here are of another kind."),
        (
            "GraniteSWAForCausalLM",
            "rope_parameters",
            "x",
            "rope_parameters is 'x'; its values here are of another kind.",
        ),
        ("GraniteSWAForCausalLM", "logits_scaling", 1e9, "logits_scaling: logits_scale is 1e-09; it must be from"),
        (
            "ExaoneMoeForCausalLM",
            "sliding_window_pattern",
            [3],
            "sliding_window_pattern is [3]; its values here are of",
        ),
        ("MiniMaxForCausalLM", "mlp_alpha_factor", [], "mlp_alpha_factor is []; this build has one for all branches"),
        ("MiMoV2FlashForCausalLM", "sliding_window_size", "x", "sliding_window_size is 'x'; it must be an int from 1"),
        ("MiMoV2FlashForCausalLM", "moe_layer_freq", [0, 1.0], "moe_layer_freq is [0, 1.0]; it must have 0 or 1"),
        (
            "BailingHybridForCausalLM",
            "first_k_dense_replace",
            10**9,
            "first_k_dense_replace is 1000000000; it must be from",
        ),
    ],
)
def test_a_wrong_value_of_a_family_is_refused_by_its_key(architecture, key, value, message):
    with pytest.raises((InvalidInput, Unsupported), match="^config.json: " + re.escape(message)):
        parse_config(LLAMA | {"architectures": [architecture]} | OTHERS[architecture] | {key: value})
