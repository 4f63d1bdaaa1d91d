# %% [markdown]
# # A sliding window
#
# A layer that sees four tokens back. Training and decoding give the same results, and tokens outside
# the window change nothing.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from jattn.nn import MultiHeadAttention

WIDTH, LENGTH, WINDOW = 16, 12, 4
attention = MultiHeadAttention(2, WIDTH, sliding_window=WINDOW, decode=False, rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(0), (1, LENGTH, WIDTH))

# %% [markdown]
# The derivative of each output row with respect to each input row shows the rows that it sees.


# %%
@jax.jit
def derivative(x):
    return jax.jacrev(lambda x: attention(x, is_causal=True)[0].sum(-1))(x)


seen = np.abs(derivative(x)[:, 0]).sum(-1) > 0
figure, axes = plt.subplots(figsize=(3, 3))
axes.imshow(seen, cmap="Greys")
axes.set_xlabel("input")
axes.set_ylabel("output")
figure.tight_layout()
assert (seen.sum(1) == np.minimum(np.arange(LENGTH) + 1, WINDOW)).all()

# %% [markdown]
# Decoding in pieces gives the same results as training.

# %%
attention.init_cache((1, LENGTH, WIDTH), block_size=4)
pieces = [attention(x[:, start : start + 5], decode=True) for start in (0, 5, 10)]
difference = np.abs(jnp.concatenate(pieces, 1) - attention(x, is_causal=True)).max()
print(f"largest difference {difference:.1e}")
assert difference < 1e-5
