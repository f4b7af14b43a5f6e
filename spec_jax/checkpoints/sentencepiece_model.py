"""Builds the tokenizer that a SentencePiece model describes.

transformers converts such files too, but by the model's class: it reads a unigram vocabulary as
BPE, and ignores whether spaces are merged or added before a text (seen with 5.23).
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
)

from spec_jax.checkpoints.sentencepiece_file import (
    BPE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)


def special_pieces(model: Any) -> dict[str, str]:
    """`bos_token`, `eos_token` and `unk_token`, as far as the model has them."""
    trained = model.trainer_spec
    ids = {"bos_token": trained.bos_id, "eos_token": trained.eos_id, "unk_token": trained.unk_id}
    pieces = model.pieces
    return {name: pieces[i].piece for name, i in ids.items() if 0 <= i < len(pieces)}


def backend_from_model(model: Any) -> Tokenizer:
    """A SentencePiece model as a backend that gives the same ids and adds nothing around a text.

    The names of control pieces in a text become those pieces, as in every Hugging Face tokenizer.
    The text after a control piece gets a leading space if the model begins texts with one.

    Args:
      model: the result of `read_sentencepiece`.
    """
    pieces, trained, normal = model.pieces, model.trainer_spec, model.normalizer_spec
    if trained.model_type == BPE:
        vocabulary = {piece.piece: i for i, piece in enumerate(pieces)}
        kinds = (NORMAL, USER_DEFINED, UNUSED)
        text = {piece.piece for piece in pieces if piece.type in kinds}
        kind = models.BPE(
            vocab=vocabulary,
            merges=ranked_merges(vocabulary, [piece.score for piece in pieces], text),
            unk_token=pieces[trained.unk_id].piece,
            fuse_unk=True,
            byte_fallback=trained.byte_fallback,
        )
    else:
        scores = [(piece.piece, piece.score) for piece in pieces]
        kind = models.Unigram(scores, trained.unk_id, trained.byte_fallback)
    backend = Tokenizer(kind)
    backend.normalizer = normalizers.Sequence(_normalizers(normal))
    backend.decoder = space_decoder(strip=normal.add_dummy_prefix)
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
