"""The tokenizer of a Hugging Face directory."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing

from spec_jax.checkpoints.files import read_json
from spec_jax.checkpoints.sentencepiece_model import (
    backend_from_model,
    read_sentencepiece,
    special_pieces,
)
from spec_jax.errors import CheckpointError
from spec_jax.text.chat_template import ChatTemplate
from spec_jax.text.tokenizer import Tokenizer


def tokenizer_from_directory(path: Path) -> Tokenizer:
    """The tokenizer and chat template of a Hugging Face directory, and its end tokens.

    The tokenizer is a tokenizer.json, a SentencePiece tokenizer.model, or other files that
    transformers can read.

    Raises:
      CheckpointError: there is no tokenizer, or only one that needs its own code.
    """
    try:
        tokenizer = _read(path)
        backend = tokenizer.backend_tokenizer
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged file makes the library raise
        raise CheckpointError(
            f"{path} has no tokenizer that can be read; expected tokenizer_config.json and "
            f"tokenizer.json, or a SentencePiece tokenizer.model ({error})."
        ) from error

    template = None
    if tokenizer.chat_template:
        special = tokenizer.special_tokens_map.items()
        special = {name: str(token) for name, token in special if not isinstance(token, list)}
        template = ChatTemplate(tokenizer.get_chat_template(), special)
    return Tokenizer(
        backend,
        eos_token_ids=_eos_token_ids(path, tokenizer.eos_token_id),
        bos_token_id=tokenizer.bos_token_id,
        chat_template=template,
    )


def _read(path: Path) -> Any:
    """The directory's tokenizer as transformers reads it."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    model_file = path / "tokenizer.model"
    if (path / "tokenizer.json").is_file() or not model_file.is_file():
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    model = read_sentencepiece(model_file)
    config_file = path / "tokenizer_config.json"
    # Llama's tokenizers, the only ones that still come without a tokenizer.json, begin every text.
    config: dict[str, Any] = {"add_bos_token": True, "add_eos_token": False}
    config |= special_pieces(model) | (read_json(config_file) if config_file.is_file() else {})
    with tempfile.TemporaryDirectory() as scratch:
        # transformers still reads the rest of the tokenizer, such as its chat template.
        for extra in [*path.glob("*.json"), *path.glob("*.jinja")]:
            shutil.copy(extra, scratch)
        backend_from_model(model).save(f"{scratch}/tokenizer.json")
        Path(scratch, "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(scratch, local_files_only=True)
    first = [tokenizer.bos_token] if config["add_bos_token"] and tokenizer.bos_token else []
    last = [tokenizer.eos_token] if config["add_eos_token"] and tokenizer.eos_token else []
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*first, "$A", *last],
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in first + last],
    )
    return tokenizer


def _eos_token_ids(path: Path, eos_token_id: int | None) -> list[int]:
    """All end tokens: generation_config.json's, else config.json's and the tokenizer's."""
    generation = path / "generation_config.json"
    if generation.is_file() and (ids := _as_list(read_json(generation).get("eos_token_id"))):
        return ids
    config = _as_list(read_json(path / "config.json").get("eos_token_id"))
    return sorted({*config, *_as_list(eos_token_id)})


def _as_list(ids: Any) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
