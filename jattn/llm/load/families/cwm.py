"""CWM, the code world model (arXiv:2510.02387): Llama with windows."""

from __future__ import annotations

from jattn.llm.load.families.family import Family

# Windows in three of four layers, the first of four without.
CWM = Family(
    architecture="CwmForCausalLM",
    model_type="cwm",
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "sliding_window": 8192,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
    },
    windows=lambda layer, raw: bool(layer % 4),
)
