"""Builds the tokenizer that a GGUF file describes in its metadata."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from spec_jax.checkpoints.sentencepiece_model import (
    ranked_merges,
    space_decoder,
    space_normalizers,
)
from spec_jax.errors import CheckpointError
from spec_jax.text import tokenizer as text
from spec_jax.text.chat_template import ChatTemplate

# Kinds of token in `tokenizer.ggml.token_type`.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6

_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
"""Control tokens that end a generation; GGUF names only one of them as the end."""

_SPELT = ("bos", "eos")
"""Special tokens whose strings a chat template may use."""


@dataclass(frozen=True)
class _Split:
    """How a byte-level BPE splits text into words before it merges.

    Attributes:
      patterns: each one splits the pieces of the one before into its matches and the text between
        them. Without any, GPT-2's pattern is used, which `tokenizers` has built in.
      single_digits: every digit is a word.
      nfc: text is first normalised to Unicode's composed form (NFC).
      ignore_merges: a word that is a token needs no merges.
      add_bos: texts begin with the first token unless the metadata says otherwise.
    """

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _tiktoken_pattern(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2 = _Split()
_STARCODER = _Split(single_digits=True)
_LLAMA3_PATTERN = _tiktoken_pattern(r"\p{N}{1,3}")
_LLAMA3 = _Split((_LLAMA3_PATTERN,), ignore_merges=True, add_bos=True)
_QWEN2 = _Split((_tiktoken_pattern(r"\p{N}"),), nfc=True)

_SPLITS = {
    "bloom": _Split((" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",)),
    "dbrx": _Split((_LLAMA3_PATTERN,)),
    "deepseek-r1-qwen": _QWEN2,
    "default": _GPT2,
    "falcon": _Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_PATTERN, r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "qwen2": _QWEN2,
    "refact": _STARCODER,
    "smaug-bpe": _Split((_LLAMA3_PATTERN,)),
    "smollm": _STARCODER,
    "stablelm2": _Split((_tiktoken_pattern(r"\p{N}"),)),
    "starcoder": _STARCODER,
}
"""`tokenizer.ggml.pre`, llama.cpp's names -> how to split."""


_IN_USE: WeakValueDictionary[bytes, text.Tokenizer] = WeakValueDictionary()
"""Tokenizers by a digest of what their files say of them."""


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> text.Tokenizer:
    """The tokenizer and chat template in a GGUF file's metadata.

    A target and its draft, whose templates may differ, share one backend: of 150,000 tokens it
    takes 80 MB and half a second.

    Raises:
      CheckpointError: there is none, or its kind is not supported.
    """
    names = sorted(name for name in metadata if name.startswith("tokenizer.ggml."))
    described = json.dumps([(name, metadata[name]) for name in names])
    digest = hashlib.sha256(described.encode()).digest()
    same = _IN_USE.get(digest)
    if same is None:
        tokenizer = _IN_USE[digest] = _tokenizer(metadata)
        return tokenizer
    return text.Tokenizer(
        same.backend,
        eos_token_ids=same.eos_token_ids,
        bos_token_id=same.bos_token_id,
        chat_template=_chat_template(metadata),
    )


def _tokenizer(metadata: Mapping[str, Any]) -> text.Tokenizer:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError("the GGUF file holds no tokenizer (tokenizer.ggml.tokens).")
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"the GGUF file's tokenizer has {len(tokens)} tokens but {len(kinds)} token types."
        )
    model = metadata.get("tokenizer.ggml.model")
    if model not in _MODELS:
        raise CheckpointError(
            f"tokenizer.ggml.model is {model!r}; supported: {', '.join(sorted(_MODELS))}."
        )
    # Converters fill an embedding's padding rows with names like [PAD151665].
    count = len(tokens)
    while count and kinds[count - 1] == _UNUSED and tokens[count - 1].startswith("[PAD"):
        count -= 1
    vocabulary = {token: i for i, token in enumerate(tokens[:count])}
    try:
        backend, add_bos = _MODELS[model](metadata, vocabulary)
    except CheckpointError:
        raise
    except Exception as error:  # `tokenizers` has no error class
        raise CheckpointError(f"the GGUF file's tokenizer makes no sense: {error}.") from error
    added = [i for i in range(count) if kinds[i] in (_UNKNOWN, _CONTROL, _USER_DEFINED)]
    backend.add_tokens(
        [AddedToken(tokens[i], special=kinds[i] != _USER_DEFINED, normalized=False) for i in added]
    )

    def special(name: str) -> int | None:
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return i if i is not None and 0 <= i < count else None

    bos = special("bos")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", add_bos):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]} $B",
            special_tokens=[(tokens[bos], bos)],
        )
    ends = {special(name) for name in ("eos", "eot", "eom")}
    turns = (vocabulary.get(token) for token in _END_OF_TURN)
    ends |= {i for i in turns if i is not None and kinds[i] == _CONTROL}
    return text.Tokenizer(
        backend,
        eos_token_ids=sorted(i for i in ends if i is not None),
        bos_token_id=bos,
        chat_template=_chat_template(metadata),
    )


def _chat_template(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    template, tokens = metadata.get("tokenizer.chat_template"), metadata["tokenizer.ggml.tokens"]
    if not template:
        return None
    names = {f"{name}_token": metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _SPELT}
    spelt = {name: tokens[i] for name, i in names.items() if i is not None and 0 <= i < len(tokens)}
    return ChatTemplate(template, spelt)


def _byte_level_bpe(
    metadata: Mapping[str, Any], vocabulary: dict[str, int]
) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {name!r}; supported: {', '.join(sorted(_SPLITS))}."
        )
    split = _SPLITS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.ignore_merges)
    )
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(each), "isolated") for each in split.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.patterns))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], vocabulary: dict[str, int]
) -> tuple[Tokenizer, bool]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise CheckpointError("the GGUF file's tokenizer has no tokenizer.ggml.scores.")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    # Text that looks like another token stays text.
    kinds = metadata.get("tokenizer.ggml.token_type")
    apart = (_UNKNOWN, _CONTROL, _BYTE)
    joinable = {token for token, i in vocabulary.items() if not kinds or kinds[i] not in apart}
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=ranked_merges(vocabulary, scores, joinable),
            unk_token=metadata["tokenizer.ggml.tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space_first = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(space_normalizers(first=space_first))
    backend.decoder = space_decoder(strip=space_first)
    return backend, True


_MODELS = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
