# %% [markdown]
# # An encoder and cross-attention
#
# A tiny translation: the decoder writes the source backwards. The encoder sees both ways and keeps no cache; the
# decoder's cross-attention writes the encoder's keys once and reads them in every step.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

from jattn.nn import MultiHeadAttention, attention_fn

WIDTH, VOCABULARY, LENGTH, BEGIN = 32, 8, 5, 0


class Translator(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        options = {"num_heads": 4, "in_features": WIDTH, "decode": False, "rngs": rngs}
        self.encoder = MultiHeadAttention(**options, attention_type="encoder_only")
        self.decoder = MultiHeadAttention(**options)
        self.cross = MultiHeadAttention(**options, attention_type="encoder_decoder")
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def encode(self, source):
        x = self.embed(source) + self.position(jnp.arange(LENGTH))
        return x + self.encoder(x)

    def __call__(self, encoded, target, positions, **cached):
        x = self.embed(target) + self.position(positions)
        x = x + self.decoder(x, is_causal=True, **cached)
        x = x + self.cross(x, encoded, **cached)
        return self.embed.attend(x + nnx.gelu(self.mlp(x)))


# %%
model = Translator(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, source):
    target = source[:, ::-1]
    shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BEGIN)

    def loss_of(model):
        logits = model(model.encode(source), shifted, jnp.arange(LENGTH))
        return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


rng, losses = np.random.default_rng(0), []
for _ in range(120):
    losses.append(float(train_step(model, optimizer, rng.integers(1, VOCABULARY, size=(32, LENGTH)))))
figure, axes = plt.subplots(figsize=(5, 3))
axes.plot(losses)
axes.set_xlabel("step")
axes.set_ylabel("loss")
figure.tight_layout()

# %% [markdown]
# ## Translate
#
# `init_cache` sizes both caches; only the first step is given the encoder's output.

# %%
source = rng.integers(1, VOCABULARY, size=(4, LENGTH))
model.decoder.init_cache((4, LENGTH, WIDTH), block_size=4)
model.cross.init_cache((4, LENGTH, WIDTH), block_size=4)
step = nnx.jit(lambda model, *args: model(*args, decode=True)[:, -1].argmax(-1))
token, written = jnp.full(4, BEGIN), []
for position in range(LENGTH):
    encoded = model.encode(source) if position == 0 else None
    token = step(model, encoded, token[:, None], jnp.array([position]))
    written.append(token)
right = (np.stack(written, 1) == source[:, ::-1]).mean()
print(f"{right:.0%} of the tokens are right")
assert right > 0.8

# %% [markdown]
# ## How exact is it?
#
# The error of bfloat16 attention against float64, by the number of keys.

# %%
errors, sizes = [], (4, 16, 64)
for keys in sizes:
    q, k, v = (rng.normal(size=(1, keys, 2, 16)) for _ in range(3))
    scores = np.einsum("bthd,bshd->bhts", q, k) / 4
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    exact = np.einsum("bhts,bshd->bthd", weights, v)
    found = jax.jit(attention_fn)(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)))
    errors.append(np.abs(np.asarray(found, np.float64) - exact).max())
figure, axes = plt.subplots(figsize=(5, 3))
axes.loglog(sizes, errors, "o-")
axes.set_xlabel("keys")
axes.set_ylabel("largest error")
figure.tight_layout()
assert max(errors) < 0.05
