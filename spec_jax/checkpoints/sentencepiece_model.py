"""Reads a SentencePiece file (`tokenizer.model`) and builds its tokenizer.

transformers converts such files too, but by the model's class: it reads a unigram vocabulary as
BPE, and ignores whether spaces are merged or added before a text (seen with 5.23).
"""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
)

from spec_jax.errors import CheckpointError

UNIGRAM, BPE = 1, 2
"""Kinds of model."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Kinds of piece."""


def read_sentencepiece(path: Path) -> Any:
    """The model in a file: its `pieces`, `trainer_spec` and `normalizer_spec`.

    Raises:
      CheckpointError: it is not a SentencePiece model, or its kind is not supported.
    """
    model = _message_class()()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise CheckpointError(f"{path} is not a SentencePiece model ({error}).") from error
    trainer, count = model.trainer_spec, len(model.pieces)
    if not 0 <= trainer.unk_id < count:
        raise CheckpointError(
            f"{path} is not a SentencePiece model: of {count} pieces, {trainer.unk_id} is the "
            "unknown."
        )
    if trainer.model_type not in (UNIGRAM, BPE):
        raise CheckpointError(
            f"{path} is a SentencePiece model of kind {trainer.model_type}; supported: unigram "
            f"({UNIGRAM}) and BPE ({BPE})."
        )
    if trainer.treat_whitespace_as_suffix or not model.normalizer_spec.escape_whitespaces:
        raise CheckpointError(
            f"{path} marks spaces in a way that is not supported "
            "(treat_whitespace_as_suffix, escape_whitespaces); give a tokenizer.json instead."
        )
    return model


def _message_class() -> Any:
    """The class of the protocol buffer; a process can load one of the two modules only."""
    module: Any  # generated code, whose classes no type checker knows
    try:
        from sentencepiece import sentencepiece_model_pb2 as module
    except Exception:  # not installed, made for a newer protobuf, or the other module is loaded
        from transformers.utils import sentencepiece_model_pb2_new as module
    return module.ModelProto


def special_pieces(model: Any) -> dict[str, str]:
    """`bos_token`, `eos_token` and `unk_token`, as far as the model has them."""
    trainer = model.trainer_spec
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
    pieces = model.pieces
    return {name: pieces[i].piece for name, i in ids.items() if 0 <= i < len(pieces)}


def backend_from_model(model: Any) -> Tokenizer:
    """A SentencePiece model as a backend that gives the same ids and adds nothing around a text.

    The names of control pieces in a text become those pieces, as in every Hugging Face tokenizer.
    The text after a control piece gets a leading space if the model begins texts with one.

    Args:
      model: the result of `read_sentencepiece`.
    """
    pieces, trainer, normalizer = model.pieces, model.trainer_spec, model.normalizer_spec
    if trainer.model_type == BPE:
        vocabulary = {piece.piece: i for i, piece in enumerate(pieces)}
        kinds = (NORMAL, USER_DEFINED, UNUSED)
        text = {piece.piece for piece in pieces if piece.type in kinds}
        kind = models.BPE(
            vocab=vocabulary,
            merges=ranked_merges(vocabulary, [piece.score for piece in pieces], text),
            unk_token=pieces[trainer.unk_id].piece,
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    else:
        scores = [(piece.piece, piece.score) for piece in pieces]
        kind = models.Unigram(scores, trainer.unk_id, trainer.byte_fallback)
    backend = Tokenizer(kind)
    backend.normalizer = normalizers.Sequence(_normalizers(normalizer))
    backend.decoder = space_decoder(strip=normalizer.add_dummy_prefix)
    added = [piece for piece in pieces if piece.type in (UNKNOWN, CONTROL, USER_DEFINED)]
    backend.add_tokens(
        [
            AddedToken(piece.piece, special=piece.type != USER_DEFINED, normalized=False)
            for piece in added
        ]
    )
    return backend


def _normalizers(spec: Any) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        ends = (normalizers.Replace(Regex(end), "") for end in (r"\A +", r" +\z"))
        steps += [*ends, normalizers.Replace(Regex(" +"), " ")]
    return [*steps, *space_normalizers(first=spec.add_dummy_prefix)]


def space_normalizers(*, first: bool) -> list[normalizers.Normalizer]:
    """Replaces spaces as SentencePiece does, and adds one before every text if `first`."""
    spaces = normalizers.Replace(" ", "▁")
    return [normalizers.Prepend("▁"), spaces] if first else [spaces]


def space_decoder(*, strip: bool) -> decoders.Decoder:
    """The inverse, which removes the first space of every text if `strip`."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


def ranked_merges(
    vocabulary: Mapping[str, int], scores: Sequence[float], text: Container[str]
) -> list[tuple[str, str]]:
    """SentencePiece's rule (merge the neighbours with the best score) as a ranked list of merges.

    Args:
      vocabulary: piece -> id.
      scores: of each id.
      text: the pieces that text can become, without control and byte pieces.
    """
    ranked = []
    for token, i in vocabulary.items():
        if token not in text:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in text and right in text:
                rank = -scores[i], vocabulary[left], vocabulary[right]
                ranked.append((rank, (left, right)))
    return [merge for _, merge in sorted(ranked)]
