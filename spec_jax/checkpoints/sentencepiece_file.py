"""Reads a SentencePiece file (`tokenizer.model`), a message of protocol buffers.

The sentencepiece package has the message's class too, but generated for one release of protobuf,
so that it fails to import with an older one.
"""

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from spec_jax.errors import CheckpointError

UNIGRAM, BPE = 1, 2
"""Kinds of model."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Kinds of piece."""

# Message -> field: number, type and default, as in sentencepiece_model.proto; fields that are not
# needed here are left out, and skipped in a file.
_MESSAGES = {
    "Piece": {"piece": (1, "STRING", ""), "score": (2, "FLOAT", "0"), "type": (3, "INT32", "1")},
    "TrainerSpec": {
        "model_type": (3, "INT32", "1"),
        "treat_whitespace_as_suffix": (24, "BOOL", "false"),
        "byte_fallback": (35, "BOOL", "false"),
        "unk_id": (40, "INT32", "0"),
        "bos_id": (41, "INT32", "1"),
        "eos_id": (42, "INT32", "2"),
    },
    "NormalizerSpec": {
        "precompiled_charsmap": (2, "BYTES", ""),
        "add_dummy_prefix": (3, "BOOL", "true"),
        "remove_extra_whitespaces": (4, "BOOL", "true"),
        "escape_whitespaces": (5, "BOOL", "true"),
    },
}


def read_sentencepiece(path: Path) -> Any:
    """The model in a file: its `pieces`, `trainer_spec` and `normalizer_spec`.

    Raises:
      CheckpointError: it is not a SentencePiece model, or its kind is not supported.
    """
    model = _model_class()()
    try:
        model.ParseFromString(path.read_bytes())
    except message.DecodeError as error:
        raise CheckpointError(f"{path} is no SentencePiece model ({error}).") from error
    trained, count = model.trainer_spec, len(model.pieces)
    if not 0 <= trained.unk_id < count:
        raise CheckpointError(
            f"{path} is no SentencePiece model: of {count} pieces, {trained.unk_id} is the unknown."
        )
    if trained.model_type not in (UNIGRAM, BPE):
        raise CheckpointError(
            f"{path} is a SentencePiece model of kind {trained.model_type}; supported: unigram "
            f"({UNIGRAM}) and BPE ({BPE})."
        )
    if trained.treat_whitespace_as_suffix or not model.normalizer_spec.escape_whitespaces:
        raise CheckpointError(
            f"{path} marks spaces in a way that is not supported "
            "(treat_whitespace_as_suffix, escape_whitespaces); give a tokenizer.json instead."
        )
    return model


@cache
def _model_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="spec_jax_sentencepiece.proto", package="sp")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for field, (number, kind, default) in fields.items():
            described.field.add(
                name=field,
                number=number,
                label=kinds.LABEL_OPTIONAL,
                type=kinds.Type.Value(f"TYPE_{kind}"),
                default_value=default,
            )
    model = file.message_type.add(name="Model")
    parts = [("pieces", "Piece"), ("trainer_spec", "TrainerSpec")]
    for number, (field, kind) in enumerate([*parts, ("normalizer_spec", "NormalizerSpec")], 1):
        model.field.add(
            name=field,
            number=number,
            label=kinds.LABEL_REPEATED if field == "pieces" else kinds.LABEL_OPTIONAL,
            type=kinds.TYPE_MESSAGE,
            type_name=f".sp.{kind}",
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("sp.Model"))
