"""A model of your own behind the engine: any nnx module with a `paged_spec`, a call over paged caches, and `logits`.

python examples/own_model.py
"""

from __future__ import annotations

from flax import nnx

from jattn import LLM, MultiHeadAttention, SamplingParams
from jattn.llm.models import PagedSpec


class OneLayer(nnx.Module):
    """The smallest language model with attention."""

    paged_spec = PagedSpec(vocab_size=32, max_model_len=64, num_layers=1, num_kv_heads=2, head_dim=8)

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.attention = MultiHeadAttention(2, 16, decode=False, rngs=rngs)

    def __call__(self, token_ids, positions, kv_caches, metadata):
        """Returns the hidden states of packed tokens and the caches."""
        x = self.embed(token_ids)
        attended, cache = self.attention(x, cache=kv_caches[0], metadata=metadata)
        return x + attended, (cache,)

    def logits(self, hidden):
        """Returns the logits of the next token."""
        return self.embed.attend(hidden)


def main() -> list[list[int]]:
    """Generates greedily for two prompts at once; returns their tokens."""
    with LLM(OneLayer(nnx.Rngs(0))) as llm:
        outputs = llm.generate([[1, 2, 3], [4]], SamplingParams(temperature=0.0, max_tokens=5))
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    print(tokens)
    return tokens


if __name__ == "__main__":
    main()
