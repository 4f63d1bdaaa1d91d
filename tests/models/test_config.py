"""ModelConfig and RopeScaling: what they refuse, and in which words."""

from __future__ import annotations

import dataclasses
import re

import jax
import pytest
from flax import nnx

from jattn.llm.models import (
    Decoder,
    DeltaNetConfig,
    FullAttentionConfig,
    LatentConfig,
    MoEConfig,
    PerLayerInputConfig,
    RopeScaling,
    ShortConvConfig,
    num_parameters,
)
from tests.support.tiny_models import tiny_config
from torch_core.base.errors import InvalidInput, Unsupported

MOE = MoEConfig(
    num_experts=3,
    num_experts_per_tok=2,
    intermediate_size=8,
    router_bias=True,
    expert_bias=True,
    shared_intermediate_size=16,
    dense_layers=(1,),
)
LATENT = LatentConfig(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=16, v_head_dim=6, q_lora_rank=10)
LATENTS = {"latent": LATENT, "num_key_value_heads": 4}
CONV = {"layer_types": ("attention", "conv"), "short_conv": ShortConvConfig()}
LONGROPE = RopeScaling(rope_type="longrope", factor=2.0, short_factor=(1.0,), long_factor=(1.0,))
REFUSED = [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be from 1 to 512."),
    ({"vocab_size": 0}, "vocab_size is 0; it must be from 1 to 1048576."),
    ({"hidden_size": 48.0}, "hidden_size is 48.0; it must be an int from 1 to 65536."),
    ({"num_attention_heads": True}, "num_attention_heads is True; it must be an int from 1 to 1024."),
    ({"num_key_value_heads": 3}, "num_attention_heads is 4; it must be a multiple of num_key_value_heads (3)."),
    ({"head_dim": 15}, "head_dim is 15; rotary embeddings need an even number."),
    ({"head_dim": 513}, "head_dim is 513; it must be from 1 to 512."),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0; it must be from 1e-12 to 1."),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a finite number from 1e-12 to 1."),
    ({"rope_theta": float("nan")}, "rope_theta is nan; it must be a finite number from 1 to 1e+12."),
    ({"rope_scaling": {"factor": 2}}, "rope_scaling is {'factor': 2}; it must be a RopeScaling or None."),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false."),
    ({"sliding_window": 0}, "sliding_window is 0; it must be from 1 to 16777216."),
    ({"dtype": "float64"}, "dtype is 'float64'; it must be one of float32, bfloat16, float16."),
    ({"bos_token_id": 257}, "bos_token_id is 257; it must be a token id from 0 to 256."),
    (
        {"full_attention": FullAttentionConfig(head_dim=16, num_key_value_heads=3)},
        "full_attention.num_key_value_heads is 3; it must divide num_attention_heads (4).",
    ),
    (
        {"full_attention": FullAttentionConfig(head_dim=15, num_key_value_heads=1)},
        "full_attention.head_dim is 15; rotary embeddings need an even number.",
    ),
    (
        {"per_layer_input": PerLayerInputConfig(hidden_size=4, vocab_size=9, num_layers=1)},
        "per_layer_input.num_layers is 1; it must have one for each of the 2 layers.",
    ),
    ({"layer_windows": (4,)}, "layer_windows has 1 entries; it must have one for each of the 2 layers, or none."),
    ({"layer_windows": (4, 0)}, "layer_windows[1] is 0; it must be from 1 to 16777216."),
    (
        {"layer_windows": (4, None), "sliding_window": 4},
        (
            "sliding_window is 4 and layer_windows is given; the first is for all layers, the second where they "
            "differ: leave one out."
        ),
    ),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; it must be from 0.001 to 1."),
    (
        {"partial_rotary_factor": 0.2},
        "head_dim * partial_rotary_factor is 3; rotary embeddings need an even number.",
    ),
    ({"rope_scaling": LONGROPE}, "rope_scaling.short_factor has 1 entries; it must have 8, one for each rotated pair."),
    ({"logits_scale": 0}, "logits_scale is 0; it must be from 1e-06 to 1e+06."),
    ({"moe": {}}, "moe is {}; it must be a MoEConfig or None."),
    ({"latent": {}}, "latent is {}; it must be a LatentConfig or None."),
    ({**LATENTS, "head_dim": 8}, "head_dim is 8; with latents it is qk_rope_head_dim (16)."),
    ({"layer_types": ("conv",)}, "layer_types has 1 entries; it must have one for each of the 2 layers, or none."),
    (
        CONV | {"short_conv": None},
        "layer_types[1] is 'conv' and short_conv None; give short_conv, the sizes of such a layer.",
    ),
    (
        CONV | {"layer_windows": (None, 4)},
        "layer_windows[1] is 4 and layer_types[1] 'conv'; a layer without attention has None.",
    ),
    (
        CONV | {"kv_sharing_targets": (None, 0)},
        "kv_sharing_targets name layer 1, which is 'conv'; a layer without attention has no cache to share.",
    ),
    (
        {"layer_types": ("attention", "feed_forward")},
        "layer_types[1] is 'feed_forward' and single_branch False; a layer has a mixer then.",
    ),
    ({"eos_token_ids": (0, -1)}, "eos_token_ids[1] is -1; it must be a token id from 0 to 256."),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_a_wrong_value_is_refused_with_its_name_and_limit(changes, message):
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_type": "batch_norm"}, "norm_type is 'batch_norm'; this build has rms_norm, rms_norm_wide, "),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'; this build has silu, gelu, gelu_new, "),
        ({"layer_types": ("attention", "fourier")}, "layer_types[1] is 'fourier'; this build has attention, conv, "),
        (CONV | {"layer_types": ("conv", "conv")}, "layer_types is ('conv', 'conv'); a layer of this build's decoders"),
        (CONV | {"is_encoder": True}, "layer_types is ('attention', 'conv'); encoders and their decoders attend."),
        ({"single_branch": True}, "single_branch is True; such layers have layer_types and a norm before them."),
        (
            {"norm_placement": "stream", "parallel_block": "two_norms"},
            "parallel_block is 'two_norms'; norms of the residual stream stand between two branches.",
        ),
        ({"hidden_act": "xielu"}, "hidden_act is 'xielu'; it gates nothing, and no experts have it."),
        (
            {"lm_head_bias": True, "tie_word_embeddings": True},
            "lm_head_bias is True; a head that is the embedding has none.",
        ),
        ({"latent": LATENT}, "num_key_value_heads is 2; attention over latents has 4."),
        ({**LATENTS, "sliding_window": 8}, "sliding_window is 8; attention over latents has None."),
        ({**LATENTS, "attention_bias": True}, "attention_output_bias is False; attention over latents has True."),
        (
            {**LATENTS, "rope_scaling": RopeScaling(rope_type="yarn", factor=2.0, attention_factor=3.0)},
            "rope_scaling.attention_factor is 3.0; attention over latents has None.",
        ),
    ],
    ids=str,
)
def test_an_option_that_is_not_there_is_unsupported(changes, message):
    with pytest.raises(Unsupported, match=f"^{re.escape(message)}"):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4; it must be from 1 to 3."),
        ({"num_experts": 10**6}, "num_experts is 1000000; it must be from 1 to 4096."),
        ({"router_bias": 1}, "router_bias is 1; it must be true or false."),
        ({"n_group": 2}, "n_group is 2 with 3 experts; it must divide them into groups of at least 1."),
        (
            {"n_group": 3, "topk_group": 2, "score_correction_bias": True},
            "n_group is 3 with 3 experts; it must divide them into groups of at least 2.",
        ),
        ({"n_group": 3}, "num_experts_per_tok is 2; 1 groups have 1 experts."),
        ({"topk_group": 2}, "topk_group is 2; it must be from 1 to 1."),
        ({"n_shared_experts": 1}, "shared_intermediate_size is 16 and n_shared_experts 1; give one."),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0.0; it must be from 1e-06 to 1e+06."),
    ],
    ids=str,
)
def test_wrong_experts_are_refused(changes, message):
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        dataclasses.replace(MOE, **changes)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        (ShortConvConfig, {"conv_size": 9}, "short_conv.conv_size is 9; it must be from 2 to 8."),
        (DeltaNetConfig, {"num_heads": 3}, "delta_net.num_heads is 3; it must be a multiple of num_kv_heads (2)."),
    ],
    ids=str,
)
def test_wrong_sizes_of_layers_with_a_state_are_refused(part, changes, message):
    sizes = {} if part is ShortConvConfig else {"num_kv_heads": 2, "key_dim": 8, "value_dim": 8}
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        part(**sizes | changes)


def test_an_unknown_score_of_experts_is_unsupported():
    with pytest.raises(Unsupported, match=r"^scoring_func is 'relu'; this build has softmax, sigmoid, sparsemixer\.$"):
        dataclasses.replace(MOE, scoring_func="relu")


def test_a_latent_without_elements_is_refused():
    with pytest.raises(InvalidInput, match=r"^kv_lora_rank is 0; it must be from 1 to 65536\.$"):
        dataclasses.replace(LATENT, kv_lora_rank=0)


def test_an_unknown_rope_type_is_unsupported():
    message = "rope_type is 'quadratic'; this build has default, linear, dynamic, llama3, yarn, longrope, proportional."
    with pytest.raises(Unsupported, match=f"^{re.escape(message)}$"):
        RopeScaling(rope_type="quadratic", factor=2.0)


def test_llama3_frequency_factors_in_the_wrong_order_are_refused():
    message = "rope_scaling.high_freq_factor is 1.0; it must be greater than low_freq_factor (4.0)."
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        RopeScaling(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0)


def test_a_rope_factor_below_one_is_refused():
    with pytest.raises(InvalidInput, match=re.escape("rope_scaling.factor is 0.5; it must be from 1 to 1e+06.")):
        RopeScaling(rope_type="linear", factor=0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
        {"norm_type": "layer_norm", "norm_bias": True, "norm_placement": "both", "gated_mlp": False, "mlp_bias": True},
        {"position_embedding": "learned", "embedding_norm": True, "qk_norm": "per_head", "attention_sinks": True},
        {"parallel_block": "shared_norm", "qk_norm": "all", "moe": MOE},
        {**LATENTS, "attention_bias": True, "attention_output_bias": True},
        {
            **LATENTS,
            "latent": dataclasses.replace(LATENT, q_lora_rank=None),
            "moe": dataclasses.replace(MOE, score_correction_bias=True, shared_intermediate_size=0, n_shared_experts=2),
        },
    ],
    ids=str,
)
def test_num_parameters_is_the_size_of_the_model_that_is_built(changes):
    config = tiny_config(**changes)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    assert num_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
