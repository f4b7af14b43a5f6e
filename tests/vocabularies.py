"""Tokenizers of many kinds, trained in a moment, and strings that are hard on them."""

import functools
import json
import random
from collections.abc import Iterator

import tokenizers
from tokenizers import (
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from spec_jax.checkpoints.sentencepiece_model import space_decoder, space_normalizers
from spec_jax.text.tokenizer import Tokenizer
from tests.prompts import COPY_PROMPTS, PROMPTS

OTHER_LANGUAGES = [
    "naïve café — “quotes” … über die Brücke, où est-ce?",
    "日本語のテキストはここにあります。これはテストです。",
    "한국어 문장도 있습니다. 이것은 시험입니다.",
    "هذا نص باللغة العربية للاختبار. שלום עולם",
    "Это русский текст для проверки. Αυτό είναι ελληνικό κείμενο.",
    "यह हिन्दी में एक परीक्षण है",
]
CORPUS = [*(line for text in PROMPTS + COPY_PROMPTS for line in text.splitlines())]
CORPUS += 8 * OTHER_LANGUAGES
CHAT_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_MARKS = ("<unk>", "<s>", "</s>")
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_bpe() -> Tokenizer:
    """As GPT-2's and SmolLM2's."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return trained(backend, trainers.BpeTrainer, 700, CHAT_MARKS, eos=[0, 2], alphabet=True)


def composing_bpe() -> Tokenizer:
    """As Qwen2's: composes characters, other words, other marks."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    marks = ("<|im_end|>", "<|end|>", "<tool>")
    return trained(backend, trainers.BpeTrainer, 1200, marks, eos=[1], alphabet=True)


def sentencepiece_bpe() -> Tokenizer:
    """As Llama 2's: a space before every text, a first token, bytes to fall back on."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence(space_normalizers(first=True))
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for the training only
    backend.decoder = space_decoder(strip=True)
    marks = (*LLAMA_MARKS, *BYTE_TOKENS)
    tokenizer = trained(backend, trainers.BpeTrainer, 1000, marks, eos=[2], bos=1)
    described = json.loads(tokenizer.to_json())
    described["pre_tokenizer"] = None
    described["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    described["added_tokens"] = described["added_tokens"][: len(LLAMA_MARKS)]
    return rebuilt(described, eos=[2], bos=1)


def unigram() -> Tokenizer:
    """As SentencePiece's unigram model with byte fallback."""
    tokenizer = unigram_without_bytes(rewrites=False)
    described = json.loads(tokenizer.to_json())
    vocabulary = described["model"]["vocab"]
    vocabulary[3:3] = [[token, -20.0] for token in BYTE_TOKENS]
    described["model"]["byte_fallback"] = True
    described["decoder"] = json.loads(space_decoder(strip=True).__getstate__())
    return rebuilt(described, eos=[2], bos=1)


def unigram_without_bytes(*, rewrites: bool = True) -> Tokenizer:
    """As T5's: rewrites characters, joins spaces, and does not know every character."""
    backend = tokenizers.Tokenizer(models.Unigram())
    if rewrites:
        backend.normalizer = normalizers.Sequence(
            [normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return trained(
        backend, trainers.UnigramTrainer, 800, LLAMA_MARKS, eos=[2], bos=1, unk_token="<unk>"
    )


def words() -> Tokenizer:
    """Whole words and marks; spaces are lost."""
    backend = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return trained(backend, trainers.WordLevelTrainer, 2000, ("[UNK]", "[END]"), eos=[1])


def word_pieces() -> Tokenizer:
    """As BERT's: small letters, pieces of words."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    marks = ("[UNK]", "[CLS]", "[SEP]")
    return trained(backend, trainers.WordPieceTrainer, 1000, marks, eos=[2], bos=1)


def trained(
    backend, trainer, size, marks, *, eos, bos=None, alphabet=False, **options
) -> Tokenizer:
    """A backend trained on the corpus, with special tokens as its first."""
    if alphabet:
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainer(vocab_size=size, special_tokens=list(marks), show_progress=False, **options)
    backend.train_from_iterator(CORPUS, trainer)
    return rebuilt(json.loads(backend.to_str()), eos=eos, bos=bos)


def rebuilt(described: dict, *, eos: list[int], bos: int | None) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(json.dumps(described))
    if bos is not None:
        name = backend.id_to_token(bos)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", special_tokens=[(name, bos)]
        )
    return Tokenizer(backend, eos_token_ids=eos, bos_token_id=bos)


LOSSLESS = {
    "byte level": byte_level_bpe,
    "composing": composing_bpe,
    "sentencepiece": sentencepiece_bpe,
    "unigram": unigram,
}
"""Every text comes back from these as it went in, but that one of them composes characters."""

LOSSY = {"t5": unigram_without_bytes, "words": words, "word pieces": word_pieces}


@functools.cache
def vocabulary(name: str) -> Tokenizer:
    return (LOSSLESS | LOSSY)[name]()


_EMOJI = ["🙂", "👩‍👩‍👧", "🇫🇷", "🏳️‍🌈", "👍🏽", "❤️", "🫠", "1️⃣"]
_MARKS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<0x41>", "<unk>", "[UNK]", "##a", "▁", "Ġ"]


def hard_strings(count: int, seed: int = 0) -> Iterator[str]:
    """Texts of many scripts and kinds, in pieces that do not fit together."""
    draw = random.Random(seed)
    text_words = [word for line in CORPUS for word in line.split()]

    def characters(first: int, last: int, most: int) -> str:
        return "".join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, most)))

    kinds = [
        lambda: " " + " ".join(draw.choices(text_words, k=draw.randint(1, 8))),
        lambda: " " + " ".join(draw.choices(text_words, k=draw.randint(1, 8))),
        lambda: draw.choice(text_words)[: draw.randint(1, 5)],
        lambda: (
            draw.choice([" ", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000"])
            * draw.randint(1, 5)
        ),
        lambda: "".join(draw.choices(_EMOJI, k=draw.randint(1, 3))),
        lambda: characters(0x4E00, 0x9FFF, 6),  # Chinese
        lambda: characters(0xAC00, 0xD7A3, 4),  # Korean
        lambda: characters(0x5D0, 0x5EA, 6) + " " + characters(0x627, 0x64A, 6),  # right to left
        lambda: "e" + characters(0x300, 0x36F, 3),  # combining marks
        lambda: characters(0x1F300, 0x1FAFF, 3),
        lambda: characters(0, 0x1F, 3),
        lambda: characters(0x7F, 0x9F, 2),
        lambda: draw.choice(["\ufffd", "\ufeff", "\u200b", "\u200e", "\u202e", "\u2028", "\x00"]),
        lambda: characters(0x10000, 0x10FFFF, 2),
        lambda: draw.choice(_MARKS),
        lambda: str(draw.randint(0, 10**9)),
        lambda: "".join(draw.choices("()[]{}<>=+-*/.,:;!?'\"_#@\\|~`", k=draw.randint(1, 6))),
    ]
    for _ in range(count):
        yield "".join(draw.choice(kinds)() for _ in range(draw.randint(1, 6)))
