# %% [markdown]
# # Swap one class in a minGPT
#
# A character model in plain Flax, with `nnx.MultiHeadAttention` replaced by `jattn.nn.MultiHeadAttention`. Weights and
# training code stay; generation gets a cache that takes prompts of any length, each sequence at its own.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

from jattn.nn import MultiHeadAttention

TEXT = "a list is a list, a set is a set; " * 8
VOCABULARY = sorted(set(TEXT))
TOKENS = np.array([VOCABULARY.index(character) for character in TEXT])
WIDTH, CONTEXT = 32, 24


# %%
class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        # Was: nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.attention = MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, **cached):
        x = x + self.attention(self.norm(x), is_causal=True, **cached)
        return x + nnx.gelu(self.mlp(x))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(len(VOCABULARY), WIDTH, rngs=rngs)
        self.position = nnx.Embed(64, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens, positions, **cached):
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, **cached)
        return self.embed.attend(x)


# %% [markdown]
# ## Train

# %%
model = GPT(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, rows):
    def loss_of(model):
        logits = model(rows[:, :-1], jnp.arange(rows.shape[1] - 1))
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


rng, losses = np.random.default_rng(0), []
for _ in range(60):
    starts = rng.integers(len(TOKENS) - CONTEXT - 1, size=8)
    losses.append(float(train_step(model, optimizer, TOKENS[starts[:, None] + np.arange(CONTEXT + 1)])))
figure, axes = plt.subplots(figsize=(5, 3))
axes.plot(losses)
axes.set_xlabel("step")
axes.set_ylabel("loss")
figure.tight_layout()
assert losses[-1] < losses[0] / 3

# %% [markdown]
# ## Generate
#
# Two prompts of different lengths in one batch. The first call takes both prompts whole, padded on the right; every
# later call takes one token of each.

# %%
prompts = ["a list is", "a se"]
lengths = jnp.array([len(prompt) for prompt in prompts])
padded = np.zeros((2, 9), int)
for row, prompt in zip(padded, prompts, strict=True):
    row[: len(prompt)] = [VOCABULARY.index(character) for character in prompt]
for block in model.blocks:
    block.attention.init_cache((2, 64, WIDTH))


@nnx.jit
def step(model, tokens, first, lengths):
    positions = first[:, None] + jnp.arange(tokens.shape[1])
    logits = model(tokens, positions, decode=True, lengths=lengths)
    return jnp.take_along_axis(logits, (lengths - 1)[:, None, None], 1)[:, 0].argmax(-1)


token, position, ones = step(model, padded, jnp.zeros(2, int), lengths), lengths, jnp.ones(2, int)
generated = [token]
for _ in range(11):
    token = step(model, token[:, None], position, ones)
    position = position + 1
    generated.append(token)
for prompt, row in zip(prompts, np.stack(generated, 1), strict=True):
    print(prompt + "".join(VOCABULARY[index] for index in row))
