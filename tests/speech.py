"""A tiny random speech model, as a Hugging Face directory, and sounds for it."""

import json
import struct

import numpy as np
import tokenizers
from safetensors import safe_open

from spec_jax.checkpoints.hf_writer import write_model
from spec_jax.models import whisper
from spec_jax.models.model import Model

LANGUAGES = ("en", "de", "fr")
TIMESTAMPS = 1501
ENGLISH, MULTILINGUAL = 2000, 51865
"""Sizes of vocabularies; OpenAI's models of more than 51,864 ids know several languages."""


def tokenizer():
    """Bytes, and Whisper's special tokens after them."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({each: i for i, each in enumerate(alphabet)}, [])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    names = ["endoftext", "startoftranscript", *LANGUAGES, "translate", "transcribe"]
    names += ["startoflm", "startofprev", "nospeech", "notimestamps"]
    made.add_special_tokens([f"<|{each}|>" for each in names])
    return made


def config(vocab_size=ENGLISH, layers=2, bins=8, positions=100):
    return whisper.config_from_hf(
        {
            "vocab_size": vocab_size,
            "num_mel_bins": bins,
            "d_model": 16,
            **{f"{each}_layers": layers for each in ("encoder", "decoder")},
            **{f"{each}_attention_heads": 2 for each in ("encoder", "decoder")},
            **{f"{each}_ffn_dim": 32 for each in ("encoder", "decoder")},
            "max_source_positions": positions,
            "max_target_positions": 192,
            "decoder_start_token_id": 257,
        }
    )


def write_speech_model(path, seed=0, vocab_size=ENGLISH, layers=2):
    """A directory as transformers writes one; 100 positions are two seconds of audio."""
    model = Model.random(config(vocab_size, layers), seed=seed)
    model = model.with_weights({"embed.weight": model.weights["embed.weight"] * 20})
    write_model(path, model, "float32")
    tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    told = {"eos_token_id": 256, "suppress_tokens": [257, 264], "begin_suppress_tokens": [220, 256]}
    (path / "generation_config.json").write_text(json.dumps(told))
    return str(path)


def sound(seconds, seed=0):
    """Noise whose colour changes."""
    random = np.random.default_rng(seed)
    noise = random.normal(size=int(16000 * seconds)).astype(np.float32)
    return noise * np.sin(np.arange(noise.size) / (500 + 300 * seed)).astype(np.float32) * 0.1


def as_ctranslate2(path, kind=np.float16):
    """The bytes of a model.bin with the weights of a directory that `write_speech_model` wrote."""
    with safe_open(path / "model.safetensors", "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    variables = {}
    linears = {"self_attention": "self_attn", "attention": "encoder_attn"}
    norms = {**{ours: f"{own}_layer_norm" for ours, own in linears.items()}}

    def add(name, value, dtype=None):
        variables[name] = np.asarray(value, dtype or kind)

    def add_linear(name, theirs):
        weights = [tensors[f"{each}.weight"] for each in theirs]
        biases = [
            tensors.get(f"{each}.bias", np.zeros(len(weight)))
            for each, weight in zip(theirs, weights, strict=True)
        ]
        weight = np.concatenate(weights)
        if kind == np.int8:
            scales = 127 / np.abs(weight).max(1)
            add(f"{name}/weight", np.round(weight * scales[:, None]))
            add(f"{name}/weight_scale", scales, np.float32)
        else:
            add(f"{name}/weight", weight)
        add(f"{name}/bias", np.concatenate(biases), other)

    def add_norm(name, theirs):
        add(f"{name}/gamma", tensors[f"{theirs}.weight"], other)
        add(f"{name}/beta", tensors[f"{theirs}.bias"], other)

    other = np.float32 if kind == np.int8 else kind
    for stack in ("encoder", "decoder"):
        own = f"model.{stack}"
        add(f"{stack}/num_heads", 2, np.int16)
        add(f"{stack}/pre_norm", 1, np.int8)
        add(
            f"{stack}/position_encodings/encodings", tensors[f"{own}.embed_positions.weight"], other
        )
        add_norm(f"{stack}/layer_norm", f"{own}.layer_norm")
        for layer in range(2):
            theirs, ours = f"{own}.layers.{layer}", f"{stack}/layer_{layer}"
            for module, name in linears.items():
                if stack == "encoder" and module == "attention":
                    continue
                add_norm(f"{ours}/{module}/layer_norm", f"{theirs}.{norms[module]}")
                q, k, v, out = (f"{theirs}.{name}.{each}_proj" for each in ("q", "k", "v", "out"))
                groups = [[q, k, v], [out]] if module == "self_attention" else [[q], [k, v], [out]]
                for number, group in enumerate(groups):
                    add_linear(f"{ours}/{module}/linear_{number}", group)
            add_norm(f"{ours}/ffn/layer_norm", f"{theirs}.final_layer_norm")
            for number, name in enumerate(("fc1", "fc2")):
                add_linear(f"{ours}/ffn/linear_{number}", [f"{theirs}.{name}"])
    for number in (1, 2):
        for leaf in ("weight", "bias"):
            add(
                f"encoder/conv{number}/{leaf}", tensors[f"model.encoder.conv{number}.{leaf}"], other
            )
    add("decoder/embeddings/weight", tensors["model.decoder.embed_tokens.weight"], other)
    return packed(variables, {"decoder/projection/weight": "decoder/embeddings/weight"})


KINDS = [np.float32, np.int8, np.int16, np.int32, np.float16]


def packed(variables, aliases=(), version=6, spec="WhisperSpec"):
    """A model.bin."""

    def text(value):
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    out = [struct.pack("<I", version), text(spec), struct.pack("<II", 3, len(variables))]
    for name, value in variables.items():
        out += [text(name), struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)]
        kind = next(i for i, each in enumerate(KINDS) if value.dtype == each)
        out += [struct.pack("<BI", kind, value.nbytes), value.tobytes()]
    out.append(struct.pack("<I", len(aliases)))
    for name, of in dict(aliases).items():
        out += [text(name), text(of)]
    return b"".join(out)
