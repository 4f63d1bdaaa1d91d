"""Trains the small language model in jattn/assets, from random weights, on text that comes with Python.

The text is `pydoc_data.topics`: the language reference behind Python's `help()` (Python Software Foundation, PSF
licence). There is no other text. Topics that mostly repeat others are left out; some topics are held out to choose the
best step (validation), others for the reported figures (test).

    python examples/train_embedded_model.py --output jattn/assets

The same Python, libraries, seed and thread count give the same file. About 30 minutes on one CPU core.
Needs the extra `train` (optax).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pydoc_data.topics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jattn.llm.load import save_model
from jattn.llm.models import Decoder, ModelConfig, num_parameters

END_OF_TEXT = "<|endoftext|>"
CORPUS = "pydoc_data.topics (the Python language reference; Python Software Foundation, PSF licence)"


@dataclass(frozen=True)
class Split:
    """The documents of each part; a document is one topic."""

    train: list[str]
    validation: list[str]
    test: list[str]


def main() -> None:
    options = parse_arguments()
    started = time.monotonic()
    split = split_corpus(pydoc_data.topics.topics, options.seed, options.held_out)
    sizes = {name: sum(map(len, documents)) for name, documents in vars(split).items()}
    print(
        f"Python {sys.version.split()[0]}, jax {jax.__version__}, seed {options.seed}; characters: {sizes}", flush=True
    )
    tokenizer = train_tokenizer(split.train, options.vocab_size)
    end_of_text = 0  # The trainer gives the special token the first id.
    config = ModelConfig(
        vocab_size=options.vocab_size,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_ids=(end_of_text,),
    )
    print(f"{num_parameters(config):,} parameters", flush=True)
    model = Decoder(config, rngs=nnx.Rngs(options.seed))
    nnx.update(model, round_to_bfloat16(fit(model, tokenizer, split, options)))
    for name, documents in vars(split).items():
        print(name, json.dumps(figures(model, tokenizer, documents, options.context)), flush=True)
    save_model(options.output, model, config, tokenizer, dtype="bfloat16")
    print(sample(model, tokenizer, "The ", options.seed))
    print(f"wrote {options.output} after {(time.monotonic() - started) / 60:.1f} minutes")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the embedded model on Python's own language reference.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=8, help="rows per step")
    parser.add_argument("--context", type=int, default=256, help="tokens per row")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=60, help="steps until the full learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--cut-rate", type=float, default=0.1, help="chance of a word to be cut in two in training")
    parser.add_argument("--report-every", type=int, default=50, help="steps between two validation losses")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--held-out", type=float, default=0.06, help="share of each of the two held-out parts")
    return parser.parse_args()


def split_corpus(topics: dict[str, str], seed: int, share: float) -> Split:
    """Drops topics that mostly repeat a longer one, and holds out short topics without repeated paragraphs."""
    seen: set[str] = set()
    unique = []
    for text in sorted(topics.values(), key=lambda text: (-len(text), text)):
        paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
        repeated = sum(len(paragraph) for paragraph in paragraphs if paragraph in seen)
        seen.update(paragraphs)
        if repeated < 0.5 * len(text):
            unique.append(text.strip() + "\n")
    order = np.random.default_rng(seed).permutation(len(unique))
    budget = share * sum(map(len, unique))
    parts: dict[str, list[str]] = {"validation": [], "test": [], "train": []}
    for index in order:
        fits = (name for name in parts if name == "train" or sum(map(len, parts[name])) + len(unique[index]) <= budget)
        parts[next(fits) if len(unique[index]) <= budget / 2 else "train"].append(unique[index])
    known = {paragraph for text in parts["train"] for paragraph in text.split("\n\n")}
    for name in ("validation", "test"):
        cleaned = ("\n\n".join(p for p in text.split("\n\n") if p not in known) for text in parts[name])
        parts[name] = [text for text in cleaned if text.strip()]
    return Split(**parts)


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level byte-pair tokenizer: any text can be encoded, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    start = (END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[start])
    return tokenizer


class Encoder:
    """Turns documents into tokens, and can cut words in two at random so that a word is seen in several spellings.

    The cuts replace byte-pair dropout (Provilkov et al. 2020, arXiv:1910.13267), which `tokenizers` offers without a
    seed.
    """

    def __init__(self, tokenizer: Tokenizer, documents: list[str]) -> None:
        self.tokenizer = tokenizer
        self.start = tokenizer.token_to_id(END_OF_TEXT)
        self.words = [[word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] for text in documents]
        self.known: dict[str, list[int]] = {}

    def encode(self, random: np.random.Generator | None = None, cut_rate: float = 0.0) -> list[np.ndarray]:
        """Returns int32 tokens of each document, after one end-of-text token each."""
        return [self._encode_words(words, random, cut_rate) for words in self.words]

    def _encode_words(self, words: list[str], random: np.random.Generator | None, cut_rate: float) -> np.ndarray:
        tokens = [self.start]
        cuts = random.random((len(words), 2)) if random is not None else np.ones((len(words), 2))
        for word, (chance, place) in zip(words, cuts, strict=True):
            if chance < cut_rate and len(word) > 1:
                middle = 1 + int(place * (len(word) - 1))
                tokens += self._encode_piece(word[:middle]) + self._encode_piece(word[middle:])
            else:
                tokens += self._encode_piece(word)
        return np.array(tokens, np.int32)

    def _encode_piece(self, piece: str) -> list[int]:
        if piece not in self.known:
            self.known[piece] = [token.id for token in self.tokenizer.model.tokenize(piece)]
        return self.known[piece]


def training_batches(encoder: Encoder, options: argparse.Namespace) -> Iterator[np.ndarray]:
    """Yields int32[batch, context + 1] for ever; each pass shuffles the documents and starts at another offset."""
    random = np.random.default_rng(options.seed)
    width = options.context + 1
    rows: list[np.ndarray] = []
    while True:
        documents = encoder.encode(random, options.cut_rate)
        stream = np.concatenate([documents[index] for index in random.permutation(len(documents))])
        stream = stream[random.integers(options.context) :]
        cut = [stream[start : start + width] for start in range(0, len(stream) - width + 1, options.context)]
        rows += [cut[index] for index in random.permutation(len(cut))]
        while len(rows) >= options.batch:
            yield np.stack(rows[: options.batch])
            rows = rows[options.batch :]


def fit(model: Decoder, tokenizer: Tokenizer, split: Split, options: argparse.Namespace) -> nnx.State:
    """Trains and returns the parameters with the lowest validation loss seen."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, options.warmup, options.steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule,
            b2=0.98,
            weight_decay=options.weight_decay,
            mask=lambda parameters: jax.tree.map(lambda leaf: leaf.ndim > 1, parameters),
        ),
    )
    graph, parameters = nnx.split(model)
    optimizer_state = optimizer.init(parameters)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(parameters, optimizer_state, rows, key):
        def loss_of(parameters):
            logits = nnx.merge(graph, parameters).forward_dense(
                rows[:, :-1], dropout_rate=options.dropout, dropout_key=key
            )
            return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return optax.apply_updates(parameters, updates), optimizer_state, loss

    batches = training_batches(Encoder(tokenizer, split.train), options)
    validation = np.concatenate(Encoder(tokenizer, split.validation).encode())
    best, best_loss, losses, started = parameters, math.inf, [], time.monotonic()
    for step in range(1, options.steps + 1):
        key = jax.random.fold_in(jax.random.key(options.seed), step)
        parameters, optimizer_state, loss = train_step(parameters, optimizer_state, next(batches), key)
        losses.append(loss)
        if step % options.report_every == 0 or step == options.steps:
            held_out = mean_loss(graph, parameters, validation, options.context)
            if held_out < best_loss:
                best, best_loss = jax.tree.map(np.asarray, parameters), held_out
            trained, losses = float(np.mean(jax.device_get(losses))), []
            minutes = (time.monotonic() - started) / 60
            print(f"step {step:5d}  train {trained:.3f}  validation {held_out:.3f}  {minutes:.1f} min", flush=True)
    return best


def mean_loss(graph: nnx.GraphDef, parameters: nnx.State, tokens: np.ndarray, context: int) -> float:
    """Returns nats per token; every token but the first is predicted once, from up to `context` tokens before it."""
    total = 0.0
    for start in range(0, len(tokens) - 1, context):
        row = tokens[start : start + context + 1]
        padded = np.zeros(context + 1, np.int32)
        padded[: len(row)] = row
        total += float(row_losses(graph, parameters, padded[None])[0, : len(row) - 1].sum())
    return total / (len(tokens) - 1)


@functools.partial(jax.jit, static_argnums=0)
def row_losses(graph: nnx.GraphDef, parameters: nnx.State, rows: jax.Array) -> jax.Array:
    """Returns float32[rows, tokens - 1], the loss of each token after the first."""
    logits = nnx.merge(graph, parameters).forward_dense(rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])


def figures(model: Decoder, tokenizer: Tokenizer, documents: list[str], context: int) -> dict[str, float]:
    """Returns loss and perplexity per token, and bits per character, which do not depend on the tokenizer."""
    tokens = np.concatenate(Encoder(tokenizer, documents).encode())
    loss = mean_loss(*nnx.split(model), tokens, context)
    characters = sum(map(len, documents))
    return {
        "characters": characters,
        "tokens": len(tokens),
        "loss": round(loss, 4),
        "perplexity": round(math.exp(loss), 2),
        "bits_per_character": round(loss * (len(tokens) - 1) / math.log(2) / characters, 3),
    }


def round_to_bfloat16(parameters: nnx.State) -> nnx.State:
    """Returns float32 parameters, rounded as in the file, so that the figures are those of the file."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16).astype(jnp.float32), parameters)


def sample(model: Decoder, tokenizer: Tokenizer, prompt: str, seed: int, length: int = 120) -> str:
    """Continues a prompt at temperature 0.7, recomputing the whole sequence for each token: slow and simple."""
    graph, parameters = nnx.split(model)

    @jax.jit
    def next_token(parameters, tokens, position, key):
        logits = nnx.merge(graph, parameters).forward_dense(tokens[None])[0, position]
        return jax.random.categorical(key, logits / 0.7)

    tokens = tokenizer.encode(prompt).ids
    for _ in range(length):
        padded = np.zeros(256, np.int32)
        padded[: len(tokens)] = tokens
        key = jax.random.fold_in(jax.random.key(seed), len(tokens))
        tokens.append(int(next_token(parameters, padded, len(tokens) - 1, key)))
        if tokens[-1] == tokenizer.token_to_id(END_OF_TEXT):
            break
    return tokenizer.decode(tokens)


if __name__ == "__main__":
    main()
