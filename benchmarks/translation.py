"""Assisted generation of an encoder-decoder, on a T5 pair that is trained here in minutes.

    python -m benchmarks.translation train /tmp/t5     # writes /tmp/t5/target and /tmp/t5/draft
    python -m benchmarks.translation speed /tmp/t5

After the experiment of 'stairs' assisted generation (IVUS 2024): T5 translates English into German,
with a smaller T5 as its draft; plain, assisted and stairs (`prefix_batch`) take turns in one run.
The texts are sentences of a small grammar, about pets and other things that are mine or yours. No
sentence of the measured texts was trained on. Directories are Hugging Face's, so that

    spec-jax generate --target /tmp/t5/target --draft /tmp/t5/draft "My dog is cute."

works, and so does transformers.
"""

import argparse
import itertools
import os
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from tokenizers.processors import TemplateProcessing

from benchmarks.methods import show, spread
from spec_jax import LLM, SamplingParams, SpeculativeConfig
from spec_jax.checkpoints.hf_writer import write_json, write_model
from spec_jax.models import t5
from spec_jax.models.model import Model
from spec_jax.models.source import EncoderInput

PAD, END = 0, 1
NOUNS = {  # German, gender
    "dog": ("Hund", "m"), "cat": ("Katze", "f"), "house": ("Haus", "n"), "car": ("Auto", "n"),
    "friend": ("Freund", "m"), "sister": ("Schwester", "f"), "child": ("Kind", "n"),
    "garden": ("Garten", "m"), "book": ("Buch", "n"), "lamp": ("Lampe", "f"),
    "table": ("Tisch", "m"), "flower": ("Blume", "f"), "horse": ("Pferd", "n"),
    "bird": ("Vogel", "m"), "watch": ("Uhr", "f"), "picture": ("Bild", "n"),
    "coat": ("Mantel", "m"), "kitchen": ("Küche", "f"), "boat": ("Boot", "n"),
    "neighbour": ("Nachbar", "m"), "aunt": ("Tante", "f"), "bed": ("Bett", "n"),
    "rabbit": ("Hase", "m"), "violin": ("Geige", "f"),
}  # fmt: skip
ADJECTIVES = {
    "cute": "süß", "small": "klein", "big": "groß", "old": "alt", "new": "neu", "black": "schwarz",
    "white": "weiß", "tired": "müde", "happy": "fröhlich", "expensive": "teuer", "quiet": "leise",
    "loud": "laut", "beautiful": "schön", "clean": "sauber", "dirty": "schmutzig", "red": "rot",
    "young": "jung", "hungry": "hungrig", "famous": "berühmt", "empty": "leer",
}  # fmt: skip
OWNERS = {"my": "mein", "your": "dein", "his": "sein", "her": "ihr", "our": "unser"}
ENDINGS = {"m": ("", "en"), "f": ("e", "e"), "n": ("", "")}
SEEN = [("I see {}", "ich sehe {}"), ("we need {}", "wir brauchen {}"),
        ("they sell {}", "sie verkaufen {}"), ("I like {}", "ich mag {}")]  # fmt: skip
JOINED = [("and", "und"), ("but", "aber"), ("because", "denn")]
MAX_TOKENS = 64
"""Tokens of the longest source and of the longest translation."""


def phrase(random, accusative):
    owner, noun = random.choice(list(OWNERS)), random.choice(list(NOUNS))
    german, gender = NOUNS[noun]
    return f"{owner} {noun}", f"{OWNERS[owner]}{ENDINGS[gender][accusative]} {german}"


def clause(random):
    if random.random() < 0.4:
        english, german = SEEN[random.integers(len(SEEN))]
        one, other = phrase(random, 1)
        return english.format(one), german.format(other)
    one, other = phrase(random, 0)
    adjective = random.choice(list(ADJECTIVES))
    negated, very = random.random() < 0.25, random.random() < 0.3
    how = (" not" * negated + " very" * very, " nicht" * negated + " sehr" * very)
    return f"{one} is{how[0]} {adjective}", f"{other} ist{how[1]} {ADJECTIVES[adjective]}"


def sentence(random):
    one, other = clause(random)
    if random.random() < 0.5:
        english, german = JOINED[random.integers(len(JOINED))]
        more, weiter = clause(random)
        one, other = f"{one} {english} {more}", f"{other}, {german} {weiter}"
    return tuple(text[0].upper() + text[1:] + "." for text in (one, other))


def text(random):
    """One to four sentences, in English and in German."""
    pairs = [sentence(random) for _ in range(random.integers(1, 5))]
    return tuple(" ".join(each) for each in zip(*pairs, strict=True))


def make_tokenizer(texts):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return made


def batch_of(tokenizer, random, rows):
    """Sources, decoder inputs and what follows them, padded with 0."""
    pairs = [text(random) for _ in range(rows)]
    both = [
        [each.ids for each in tokenizer.encode_batch(list(texts))]
        for texts in zip(*pairs, strict=True)
    ]
    arrays = [np.zeros((rows, MAX_TOKENS), np.int32) for _ in range(3)]
    lengths = np.ones((rows,), np.int32)
    for row, (source, target) in enumerate(zip(*both, strict=True)):
        source, target = source[:MAX_TOKENS], target[:MAX_TOKENS]
        arrays[0][row, : len(source)], lengths[row] = source, len(source)
        arrays[1][row, 1 : len(target)], arrays[2][row, : len(target)] = target[:-1], target
    return *arrays, lengths


def fit(config, tokenizer, steps, rows, rate, seed):
    model = Model.random(config, seed=seed)
    # As T5 is initialised: embeddings of unit size, and scores that nothing else scales.
    scales = {"embed": 50.0, "query": config.head_dim**-0.5}
    model = model.with_weights(
        {name: each * scales.get(name.split(".")[-2], 1.0) for name, each in model.weights.items()}
    )
    schedule = optax.warmup_cosine_decay_schedule(0, rate, steps // 20, steps, rate / 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def loss(weights, sources, inputs, targets, lengths):
        trained = model.with_weights(weights)
        trained = Model(trained.graphdef, trained.params, trained.config, attention="dense")
        cache = trained.new_cache(*inputs.shape)
        encoded, _ = trained.encode(EncoderInput(sources, lengths))
        cache = type(cache)(cache.layers, cache.lengths, encoded)
        logits = trained.score(inputs, cache)[0]
        counted = (targets != PAD).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        right = ((logits.argmax(-1) == targets) * counted).sum() / counted.sum()
        return (losses * counted).sum() / counted.sum(), right

    @jax.jit
    def step(weights, state, *batch):
        (value, right), gradient = jax.value_and_grad(loss, has_aux=True)(weights, *batch)
        with jax.numpy_dtype_promotion("standard"):
            changes, state = optimizer.update(gradient, state, weights)
            return optax.apply_updates(weights, changes), state, value, right

    weights, random, begin = model.weights, np.random.default_rng(seed), time.monotonic()
    state = optimizer.init(weights)
    for number in range(steps):
        batch = batch_of(tokenizer, random, rows)
        weights, state, value, right = step(weights, state, *map(jnp.asarray, batch))
        if number % 50 == 0 or number == steps - 1:
            seconds = time.monotonic() - begin
            print(f"{number}: loss {value:.3f}, right {right:.3f}, {seconds:.0f} s", flush=True)
    return model.with_weights(weights)


def shape(tokenizer, width, layers):
    return t5.config_from_hf(
        {
            "vocab_size": tokenizer.get_vocab_size(),
            "d_model": width,
            "d_kv": 32,
            "d_ff": 2 * width,
            "num_layers": layers,
            "num_heads": width // 32,
            "feed_forward_proj": "gated-gelu",
            "n_positions": MAX_TOKENS,
        }
    )


def train(args):
    random = np.random.default_rng(0)
    tokenizer = make_tokenizer(itertools.chain(*(text(random) for _ in range(2000))))
    for name, width, layers, rate, steps in (
        ("draft", 64, 1, 4e-3, args.steps),
        ("target", 192, 3, 2e-3, args.steps),
    ):
        print(name, flush=True)
        config = shape(tokenizer, width, layers)
        model = fit(config, tokenizer, steps, args.rows, rate, seed=layers)
        path = args.folder / name
        write_model(path, model, "float32")
        tokenizer.save(str(path / "tokenizer.json"))
        write_json(
            path / "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"},
        )


def speed(args):
    target, draft = (str(args.folder / name) for name in ("target", "draft"))
    plain = LLM(target, dtype="float32", quantization="none", max_num_seqs=1)
    random = np.random.default_rng(10**6)
    texts = [("My dog is cute.", "Mein Hund ist süß.")]
    texts += [text(random) for _ in range(args.count - 1)]
    systems = {"plain": plain}
    for k in args.lookaheads:
        for name, scoring in (("assisted", "block"), ("stairs", "prefix_batch")):
            config = SpeculativeConfig(
                method="draft_model",
                draft=draft,
                num_speculative_tokens=k,
                scoring=scoring,
                draft_length_policy="constant",
            )
            systems[f"{name}, K = {k}"] = plain.with_speculation(config)
    params = SamplingParams(max_tokens=MAX_TOKENS - 1)
    token_ids, seconds, rounds = {}, {name: [] for name in systems}, {}
    for repeat in range(args.repeats + 1):  # the first pass compiles
        for name, llm in systems.items():
            begin = time.perf_counter()
            outputs = [llm.generate(english, params)[0] for english, _ in texts]
            if repeat:
                seconds[name].append(time.perf_counter() - begin)
            token_ids[name] = [each.token_ids for each in outputs]
            rounds[name] = sum(each.metrics.rounds for each in outputs)
            if name == "plain":
                translations = [each.text for each in outputs]
    print(f"\n{texts[0][0]} -> {translations[0]}\n")
    right = sum(one == other for one, (_, other) in zip(translations, texts, strict=True))
    tokens = sum(map(len, token_ids["plain"]))
    print(f"{len(texts)} texts, {tokens} tokens, {right} translated as the grammar does\n")
    show("system", "tokens/s", "plain's seconds over its own", "tokens per target call", "tokens")
    show(*["---"] * 5)
    for name in systems:
        same = "the same" if token_ids[name] == token_ids["plain"] else "OTHER"
        ratios = [one / other for one, other in zip(seconds["plain"], seconds[name], strict=True)]
        rates = [tokens / each for each in seconds[name]]
        show(name, spread(rates, 1), spread(ratios), f"{tokens / rounds[name]:.2f}", same)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    each = commands.add_parser("train")
    each.add_argument("folder", type=Path)
    each.add_argument("--steps", type=int, default=800)
    each.add_argument("--rows", type=int, default=24)
    each.set_defaults(run=train)
    each = commands.add_parser("speed")
    each.add_argument("folder", type=Path)
    each.add_argument("--count", type=int, default=24)
    each.add_argument("--repeats", type=int, default=5)
    each.add_argument("--lookaheads", type=int, nargs="+", default=[2, 4, 6])
    each.set_defaults(run=speed)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
