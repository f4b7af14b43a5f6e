"""The tokenizer of a Hugging Face directory."""

from pathlib import Path
from typing import Any

from spec_jax.checkpoints.files import read_json
from spec_jax.errors import CheckpointError
from spec_jax.tokenizer import ChatTemplate, Tokenizer


def tokenizer_from_directory(path: Path) -> Tokenizer:
    """The tokenizer and chat template of a Hugging Face directory, and what ends a generation.

    Raises:
      CheckpointError: there is no tokenizer, or only one that needs code of its own.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        backend = tokenizer.backend_tokenizer
    except Exception as error:  # whatever a damaged file makes the library raise
        raise CheckpointError(
            f"{path} has no tokenizer that can be read; expected tokenizer.json and "
            f"tokenizer_config.json ({error})."
        ) from error

    template = None
    if tokenizer.chat_template:
        named = tokenizer.special_tokens_map.items()
        spelt = {name: str(token) for name, token in named if not isinstance(token, list)}
        template = ChatTemplate(tokenizer.get_chat_template(), spelt)
    return Tokenizer(
        backend,
        eos_token_ids=_eos_token_ids(path, tokenizer.eos_token_id),
        bos_token_id=tokenizer.bos_token_id,
        chat_template=template,
    )


def _eos_token_ids(path: Path, own: int | None) -> list[int]:
    """generation_config.json names every end, of a text and of a turn; else two files know one."""
    generation = path / "generation_config.json"
    if generation.is_file() and (ids := _as_list(read_json(generation).get("eos_token_id"))):
        return ids
    return sorted({*_as_list(read_json(path / "config.json").get("eos_token_id")), *_as_list(own)})


def _as_list(ids: Any) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
