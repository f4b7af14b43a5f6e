"""`spec-jax store`: a file of outputs that method `suffix` drafts from."""

import json
from collections.abc import Iterator
from pathlib import Path

from spec_jax import checkpoints
from spec_jax.checkpoints.packing import Packing
from spec_jax.cli.screen import Screen
from spec_jax.cli.tool_options import StoreOptions
from spec_jax.engine.suffix_store import MAX_NAMESPACE, SuffixStore
from spec_jax.errors import ConfigError
from spec_jax.sharding import Placement
from spec_jax.text.tokenizer import Tokenizer


def run(options: StoreOptions, screen: Screen) -> int:
    """Adds texts and prints what the file holds; returns the exit code."""
    if len(options.namespace) > MAX_NAMESPACE:
        raise ConfigError(
            f"--namespace has {len(options.namespace)} characters; give at most {MAX_NAMESPACE}."
        )
    opened = checkpoints.open_checkpoint(
        options.target,
        dtype="auto",
        packing=Packing(),
        place=lambda config: Placement.single_device(),
        is_draft=False,
        on_progress=screen.progress,
    )
    vocab_size = opened.config.vocab_size
    store = SuffixStore(options.store, opened.tokenizer, vocab_size)
    for path in options.texts:
        screen.progress(f"reading {path}")
        for token_ids in _outputs(path, opened.tokenizer, vocab_size):
            store.add(options.namespace, token_ids)
    if options.texts:
        store.write()
    print(f"{options.store}: {store.outputs.num_tokens} tokens")
    for namespace, (_, count) in store.outputs.parts.items():
        print(f"  namespace {namespace!r}: {count} tokens")
    return 0


def _outputs(path: Path, tokenizer: Tokenizer | None, vocab_size: int) -> Iterator[list[int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; name files of UTF-8 text.") from error
    if path.suffix != ".jsonl":
        yield _encoded(text, tokenizer)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        token_ids = value.get("token_ids") if isinstance(value, dict) else None
        if isinstance(token_ids, list) and all(
            type(each) is int and 0 <= each < vocab_size for each in token_ids
        ):
            yield token_ids
        elif isinstance(value, dict) and isinstance(value.get("text"), str):
            yield _encoded(value["text"], tokenizer)
        else:
            raise ConfigError(
                f"line {number} of {path} has no token_ids below {vocab_size}, and no "
                "text; give lines as spec-jax generate --out writes them."
            )


def _encoded(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer; give .jsonl files with token_ids.")
    return tokenizer.encode(text, add_special_tokens=False)
