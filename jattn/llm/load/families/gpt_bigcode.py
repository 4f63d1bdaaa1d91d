"""StarCoder (arXiv:2305.06161), SantaCoder and Granite's first code models: GPT-2 with one key head."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.family import Key
from jattn.llm.load.families.gpt2 import GPT2

GPT_BIGCODE = replace(
    GPT2,
    architecture="GPTBigCodeForCausalLM",
    model_type="gpt_bigcode",
    keys={**GPT2.keys, "multi_query": Key("num_key_value_heads", write=lambda heads: heads == 1)},
    defaults={**GPT2.all_defaults, "activation_function": "gelu_pytorch_tanh", "multi_query": True},
    derive=lambda raw: {"num_key_value_heads": 1 if raw["multi_query"] else raw["n_head"]},
    absent=("head_dim",),
    inert={"scale_attn_weights": True},
    ignored=(
        # It follows from multi_query.
        "num_key_value_heads",
        *("attention_softmax_in_fp32", "inference_runner", "max_batch_size", "max_sequence_length"),
        *("pad_key_length", "pre_allocate_kv_cache", "scale_attention_softmax_in_fp32", "validate_runner_input"),
    ),
    order={"self_attn.qkv_proj": "by_group"},
    in_out=False,
    # Masks of old writers.
    unread=r"transformer\.h\.\d+\.attn\.bias",
    gguf=None,
)
