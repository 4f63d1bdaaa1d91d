"""Tiny random checkpoints with an encoder, made by transformers itself, and its logits for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

_T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 6, "d_ff": 40, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
_BART = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 96,
}
#: By family, the class of transformers and its options in each variant: off first, then on.
CASES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "T5ForConditionalGeneration": (
        "T5Config",
        [
            _T5 | {"num_layers": 2},
            _T5
            | {
                "feed_forward_proj": "gated-gelu",
                "tie_word_embeddings": False,
                "relative_attention_num_buckets": 8,
                "relative_attention_max_distance": 20,
            },
        ],
    ),
    "BartForConditionalGeneration": ("BartConfig", [_BART, _BART | {"scale_embedding": True, "encoder_layers": 2}]),
}
VARIANTS = [(architecture, index) for architecture, (_, options) in CASES.items() for index in range(len(options))]


def write_checkpoint(folder: Path, architecture: str, variant: int, seed: int, **sizes: Any) -> Path:
    """Writes a checkpoint as transformers saves it, with weights large enough that every option shows."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    name, variants = CASES[architecture]
    model = getattr(transformers, architecture)(getattr(transformers, name)(**(variants[variant] | sizes)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, value in (*model.named_parameters(), *model.named_buffers()):
            centre = 1.0 if "norm" in path and path.endswith("weight") else 0.0
            value.copy_(centre + 0.15 * torch.randn(value.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def reference_logits(folder: Path, encoder_ids: np.ndarray, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns transformers' logits [batch, tokens, vocab_size] in float64 arithmetic and in float32."""
    import torch
    import transformers

    inputs = {"input_ids": torch.from_numpy(encoder_ids), "decoder_input_ids": torch.from_numpy(token_ids)}
    found = []
    for dtype in (torch.float64, torch.float32):
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        with torch.no_grad():
            found.append(model.eval()(**inputs).logits.double().numpy())
    return found[0], found[1]
