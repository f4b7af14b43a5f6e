"""The data of a run: made once, file after file, and reused after an interruption."""

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spec_jax import distributed
from spec_jax.config import SamplingParams
from spec_jax.errors import ConfigError
from spec_jax.files import replace_text
from spec_jax.training.config import TrainingConfig
from spec_jax.training.examples import Example
from spec_jax.training.rows import RowFiles, bytes_per_token, write_rows
from spec_jax.training.sampling import RowSampler
from spec_jax.training.store import DATA, claim, lock

HELD_OUT = {"greedy": 0.0, "sampled": 1.0}
"""The temperatures at which acceptance is measured."""
_HELD_OUT_SEED = 1 << 62


class Data(NamedTuple):
    """The rows to learn from, and the target's answers to held-out prompts by kind."""

    train: RowFiles
    held_out: dict[str, RowFiles]


_SAMPLING = ("temperatures", "sequence_length", "sample_batch", "held_out", "seed")
"""The fields of a config that determine the contents of the rows, but not their number."""


def data_identity(config: TrainingConfig, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that determines the rows of a run."""
    return {**{name: getattr(config, name) for name in _SAMPLING}, **identity}


def make_data(
    folder: Path,
    sampler: RowSampler,
    examples: Sequence[Example],
    config: TrainingConfig,
    identity: Mapping[str, Any],
    on_progress: Callable[[str], object],
) -> Data:
    """Makes the missing files of a run's data.

    Each file is a function of the examples, the config and its own number, and is written whole or
    not at all, so an interrupted run continues with the next file, and runs can share a folder.

    Args:
      folder: the folder of the files.
      sampler: the target.
      examples: the beginnings of rows; without any the target generates prompts.
      config: the number of tokens to sample, and the sampling.
      identity: identifies these examples and this target.
      on_progress: called with a line of text.

    Raises:
      ConfigError: there are too few examples, the disk has too little space, the folder holds
        other data, or another run writes data there.
      OSError: a file cannot be written; the earlier ones are complete.
    """
    with contextlib.ExitStack() as stack:
        remedy = "wait until it has, or choose another --data-dir"
        stack.callback(lock(folder, "makes training data", remedy).release)
        claim(folder, DATA, data_identity(config, identity))
        num_rows = _announce_size(folder, sampler, config, on_progress)
        if not examples:
            examples = _questions(folder, sampler, config, num_rows, on_progress)
        examples = _fitting(examples, sampler.length, config, on_progress)
        order = np.random.default_rng(config.seed).permutation(len(examples))
        shuffled = [examples[i] for i in order]
        prompts = [_prompt(each) for each in shuffled[: config.held_out]]
        held_out = {}
        for kind, temperature in HELD_OUT.items():
            path = folder / f"held-out-{kind}.safetensors"
            if not distributed.from_first(path.is_file):
                on_progress(f"sampling held-out rows, {kind}")
                _write(path, sampler, prompts, itertools.repeat(temperature), _HELD_OUT_SEED)
            held_out[kind] = RowFiles([path])
        train: list[Path] = []
        num_tokens = 0
        for number, batch in enumerate(_batches(shuffled[config.held_out :], config)):
            if num_tokens >= config.sample_tokens:
                break
            path = folder / f"train-{number:05d}.safetensors"
            if not distributed.from_first(path.is_file):
                on_progress(f"sampling the target: {num_tokens} of {config.sample_tokens} tokens")
                first = number * config.sample_batch
                turns = itertools.islice(itertools.cycle(config.temperatures), first, None)
                _write(path, sampler, batch, turns, (config.seed << 40) + first)
            train.append(path)
            rows = RowFiles([path])
            num_tokens += int((rows.column("lengths") - rows.column("begins")).sum())
        return Data(RowFiles(train), held_out)


def _announce_size(
    folder: Path, sampler: RowSampler, config: TrainingConfig, on_progress: Callable[[str], object]
) -> int:
    """Announces the size of the data on disk, and returns the approximate number of rows."""
    token_size = bytes_per_token(sampler.llm.engine.target.config.embed_size)
    num_rows = config.sample_tokens * 3 // (2 * sampler.length) + 2 * config.held_out
    size = num_rows * sampler.length * token_size / 1e9

    def free_space() -> float:
        data_size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return (shutil.disk_usage(folder).free + data_size) / 1e9

    free = distributed.from_first(free_space)
    fitting = int(config.sample_tokens * min(config.max_disk, free) / size)
    for name, limit in (("max_disk is", config.max_disk), ("the disk's free space is", free)):
        if size > limit:
            raise ConfigError(
                f"sample_tokens is {config.sample_tokens}, whose data may take {size:.1f} GB, but "
                f"{name} {limit:.1f} GB; about {fitting} tokens would fit."
            )
    on_progress(f"the data may take {size:.1f} GB of {free:.1f} GB free, in {folder}")
    return num_rows


def _questions(
    folder: Path,
    sampler: RowSampler,
    config: TrainingConfig,
    num_rows: int,
    on_progress: Callable[[str], object],
) -> list[Example]:
    """Prompts that the target generates, kept so that they are generated once."""
    path = folder / "questions.json"
    if not distributed.from_first(path.is_file):
        questions: dict[str, None] = {}
        for turn in range(4):
            # Each prompt is answered once at every temperature.
            missing = num_rows // len(config.temperatures) + config.held_out - len(questions)
            if missing <= 0:
                break
            on_progress(f"letting the target invent {missing} prompts")
            questions |= dict.fromkeys(sampler.questions(missing, config.seed + turn))
        distributed.agree({"the prompts that the target invented": list(questions)})
        distributed.from_first(lambda: replace_text(path, json.dumps(list(questions), indent=0)))
    encode = sampler.llm.tokenizer.encode_chat
    texts = json.loads(path.read_text())
    return [Example(tuple(encode([{"role": "user", "content": text}]))) for text in texts]


def _fitting(
    examples: Sequence[Example],
    length: int,
    config: TrainingConfig,
    on_progress: Callable[[str], object],
) -> list[Example]:
    """The examples that leave at least a quarter of a row for training."""
    fitting = [each for each in examples if len(each.prompt) <= length * 3 // 4]
    if len(fitting) < len(examples):
        on_progress(
            f"leaving out {len(examples) - len(fitting)} prompts that are longer than "
            f"{length * 3 // 4} tokens"
        )
    if len(fitting) <= config.held_out:
        raise ConfigError(
            f"the data holds {len(fitting)} prompts and texts that fit rows of {length} tokens, "
            f"and held_out is {config.held_out}; give more data, or hold fewer out."
        )
    return fitting


def _batches(examples: Sequence[Example], config: TrainingConfig) -> Iterator[Sequence[Example]]:
    """The examples in batches; prompts repeat, and texts do not, since they never change.

    Prompts of a batch have similar lengths, because a batch takes as long as its longest row.
    """
    prompts = [each for each in examples if each.text is None]
    size = config.sample_batch
    shuffle = np.random.default_rng(config.seed).permutation
    for turn in itertools.chain([examples], itertools.repeat(prompts) if prompts else ()):
        ordered = sorted(turn, key=lambda each: len(each.prompt))
        batches = [ordered[first : first + size] for first in range(0, len(ordered), size)]
        for number in shuffle(len(batches)):
            yield batches[number]


def _prompt(example: Example) -> Example:
    """For evaluation the target continues a text after its first quarter."""
    if example.text is None:
        return example
    ids = (*example.prompt, *example.text)
    return Example(ids[: max(1, len(ids) // 4)])


def _write(
    path: Path,
    sampler: RowSampler,
    examples: Sequence[Example],
    temperatures: Iterable[float],
    seed: int,
) -> None:
    """Writes the rows of some examples, sampled at these temperatures with seeds from `seed` on."""
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=max(1, sampler.length - len(each.prompt)),
            seed=seed + i,
        )
        for i, (each, temperature) in enumerate(zip(examples, temperatures, strict=False))
    ]
    rows = sampler.rows(examples, params)
    distributed.from_first(lambda: write_rows(path, rows))
