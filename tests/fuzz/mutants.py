"""Damages files at random and opens them: each is refused by a typed error, or says the same.

    python -m tests.fuzz.mutants KIND COUNT [SEED]

KIND is one of `safetensors`, `gguf`, `model.bin`, `config`, `unknown keys`, `doubled keys` (of a
config), `tokenizer`, `template`, `recipe`. Of files of weights all but the numbers is damaged: only
checksums tell one number from another.
"""

import collections
import contextlib
import io
import json
import resource
import shutil
import sys
import tempfile
import time
import tomllib
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import CONFIG_MAPPING

from spec_jax.checkpoints.ctranslate2_directory import Ctranslate2Directory
from spec_jax.checkpoints.files import making_sense
from spec_jax.checkpoints.gguf_file import GgufFile
from spec_jax.checkpoints.gguf_header import read_header
from spec_jax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from spec_jax.checkpoints.hf_tokenizer import tokenizer_from_directory
from spec_jax.checkpoints.recipe import Recipe
from spec_jax.checkpoints.safetensors_files import SafetensorsFiles
from spec_jax.checkpoints.shape import gguf_shape, hf_shape
from spec_jax.errors import SpecJaxError, raising_panics
from spec_jax.models import hf_keys, whisper
from spec_jax.models.registry import FAMILIES
from spec_jax.text import chat_template
from tests.checkpoints.tiny import CONFIG, TEMPLATE, llama_tensors, write_directory, write_gguf
from tests.speech import as_ctranslate2, tokenizer, write_speech_model

MAX_SECONDS = 5.0
MAX_BYTES = 256 << 20
HOSTILE: list[Any] = [
    *(None, True, -1, 0, 1, 3, 10**5, 2**31, 10**12, 2**63, 10**40, -0.5, 1e-320, 1e308),
    *(float("nan"), float("inf"), "", "x", "nan", "\x1b[31m", "../../etc/passwd", "é" * 1000),
    *([], [[]], {}, {"x": []}, [1, "x", None], [[1], 2], {"rope_type": "yarn"}),
]
"""What takes a value's place."""

Read = Callable[[], object]


def kinds() -> dict[
    str, Callable[[Path, np.random.Generator], tuple[Path, Callable[[], bytes], Read]]
]:
    """By kind: what makes a file to damage, its next mutant, and what reads it."""
    return {
        "safetensors": _safetensors,
        "gguf": _gguf,
        "model.bin": _model_bin,
        "config": _config,
        "unknown keys": _unknown_keys,
        "doubled keys": _doubled_keys,
        "tokenizer": _tokenizer,
        "template": _template,
        "recipe": recipe,
    }


def run(kind: str, count: int, seed: int = 0) -> collections.Counter[str]:
    """Opens `count` mutants and counts the outcomes; all but `refused` and `same` is a fault.

    The last mutant of each fault is kept in the directory for temporary files.

    Args:
      kind: one of `kinds`.
      count: how many.
      seed: of the damage.
    """
    random, outcomes = np.random.default_rng(seed), collections.Counter[str]()
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file, mutant, read = kinds()[kind](Path(scratch), random)
        whole = file.read_bytes()
        expected = read()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(count):
            data = mutant()
            file.write_bytes(data)
            begin = time.monotonic()
            outcome = _outcome(read, expected)
            if time.monotonic() - begin > MAX_SECONDS:
                outcome = "SLOW"
            outcomes[outcome] += 1
            if outcome not in ("refused", "same"):
                kept = Path(tempfile.gettempdir(), f"{kind}-{outcome}.mutant".replace(" ", "-"))
                kept.write_bytes(data)
        file.write_bytes(whole)
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        if grown > MAX_BYTES + len(whole):
            outcomes[f"MEMORY {grown >> 20} MiB"] += 1
    return outcomes


def _outcome(read: Read, expected: object) -> str:
    try:
        arrays = read()
    except SpecJaxError as error:
        message = str(error)
        shown = message.isprintable() or "\n" in message
        return "refused" if shown and len(message) < 2500 else "MESSAGE"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"CRASH {type(error).__name__}"
    return "same" if expected is None or _same(arrays, expected) else "SILENT"


def _same(arrays: Any, expected: Any) -> bool:
    if arrays.keys() != expected.keys():
        return True  # names are compared with the config's when a model is built
    return any(arrays[name].shape != expected[name].shape for name in expected) or all(
        np.array_equal(arrays[name], expected[name], equal_nan=True) for name in expected
    )


def _bytes_mutant(
    original: bytes, damaged: np.ndarray, random: np.random.Generator
) -> Callable[[], bytes]:
    """Mutants with other bytes at some of these places, or a part cut out or put in."""

    def mutant() -> bytes:
        data = bytearray(original)
        for _ in range(random.integers(1, 4)):
            values = (0, 1, 127, 255, int(random.integers(256)), data[0])
            data[random.choice(damaged)] = values[random.integers(len(values))]
        if (how := random.integers(10)) == 0:
            data = data[: random.integers(len(data))]
        elif how == 1:
            at = random.choice(damaged)
            del data[at : at + random.integers(1, 9)]
        elif how == 2:
            at = random.choice(damaged)
            data[at:at] = random.bytes(random.integers(1, 9))
        return bytes(data)

    return mutant


def _safetensors(path, random):
    write_directory(path, CONFIG, llama_tensors(CONFIG))
    file = path / "model.safetensors"
    original = file.read_bytes()
    header = 8 + int.from_bytes(original[:8], "little")

    def read():
        tensors = SafetensorsFiles(path)
        return {name: tensors.read(name) for name in tensors.shapes}

    return file, _bytes_mutant(original, np.arange(header), random), read


def _gguf(path, random):
    file = write_gguf(path / "tiny.gguf", CONFIG, llama_tensors(CONFIG))
    original = file.read_bytes()
    begin = min(tensor.offset for tensor in read_header(file)[1].values())

    def read():
        tensors = GgufFile(file)
        gguf_shape(tensors)
        with making_sense(file), raising_panics():
            tokenizer_from_gguf(tensors.metadata)
        return {name: np.array(tensors.read(name)) for name in tensors.shapes}

    return file, _bytes_mutant(original, np.arange(begin), random), read


def _model_bin(path, random):
    write_speech_model(path / "model")
    directory = path / "directory"
    directory.mkdir()
    tokenizer().save(str(directory / "tokenizer.json"))
    file = directory / "model.bin"
    original = as_ctranslate2(path / "model")
    file.write_bytes(original)
    header = np.ones(len(original), bool)
    for each in Ctranslate2Directory(directory).variables.values():
        size = int(np.prod(each.shape)) * np.dtype(each.dtype).itemsize
        header[each.offset : each.offset + size] = False

    def read():
        tensors = Ctranslate2Directory(directory)
        with making_sense(file):
            whisper.config_from_hf(tensors.config)
        return {name: tensors.read(name) for name in tensors.shapes}

    return file, _bytes_mutant(original, np.flatnonzero(header), random), read


def _places(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """Where values lie in what JSON holds."""
    yield place
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in list(items)[:50]:
            yield from _places(each, (*place, key))


def _json_mutant(whole: str, random: np.random.Generator) -> Callable[[], bytes]:
    """Mutants with hostile values, keys that are missing, or text that is not JSON."""
    places = [place for place in _places(json.loads(whole)) if place]

    def mutant() -> bytes:
        value = json.loads(whole)
        for _ in range(random.integers(1, 3)):
            inner = value
            *path, last = places[random.integers(len(places))]
            with contextlib.suppress(LookupError, TypeError):  # another change was there before
                for key in path:
                    inner = inner[key]
                if random.integers(6) == 0:
                    del inner[last]
                else:
                    inner[last] = HOSTILE[random.integers(len(HOSTILE))]
        text = json.dumps(value)
        if (how := random.integers(20)) == 0:
            text = text[: random.integers(len(text))]
        elif how == 1:
            text = "[" * 100_000 + text
        return text.encode()

    return mutant


def _config(path, random):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 64}
    config = CONFIG | {"rope_parameters": rope, "quantization_config": None, "bos_token_id": 1}
    types = ("llama", "qwen2", "gemma2", "mixtral", "phi3", "gpt2", "t5", "whisper", "falcon")
    write_directory(path, config, llama_tensors(CONFIG))
    file = path / "config.json"
    texts = [
        json.dumps(
            config
            | {"model_type": each, "num_local_experts": 4, "num_experts_per_tok": 2}
            | {"sliding_window": 32, "query_pre_attn_scalar": 8, "d_model": 16, "d_ff": 32}
            | {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 64, "d_kv": 4}
        )
        for each in types
    ]
    mutants = [_json_mutant(each, random) for each in texts]

    def read():
        hf_shape(path)

    return file, lambda: mutants[random.integers(len(mutants))](), read


def _configs() -> dict[str, dict[str, Any]]:
    """By family: the config that transformers' class has by default, positions scaled."""
    configs = {family.model_type: CONFIG_MAPPING[family.model_type]() for family in FAMILIES}
    settings = {name: config.to_dict() for name, config in configs.items()}
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    for name, config in settings.items():
        if config.get("rope_parameters") and name != "gemma3_text":
            config["rope_parameters"] = dict(scaled)
    return settings


def _unknown_keys(path, random):
    configs = _configs()
    table = tomllib.loads(Path(hf_keys.__file__).with_suffix(".toml").read_text())
    harmless = {name for names in table["harmless"].values() for name in names}
    names = sorted({name for config in configs.values() for name in config} | {"type"} | harmless)
    values = [value for value in HOSTILE if value is not None]

    def mutant():
        family = list(configs)[random.integers(len(configs))]
        config = json.loads(json.dumps(configs[family]))
        inside = config
        while (tables := _tables(inside)) and random.integers(2):
            inside = tables[random.integers(len(tables))]
        name = names[0]
        while name in names:
            name = _misspelt(names[random.integers(len(names))], random)
        inside[name] = values[random.integers(len(values))]
        return json.dumps(config).encode()

    return _config_file(path, configs, mutant)


def _tables(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects in an object, but labels, whose keys are free."""
    return [
        each for each in config.values() if isinstance(each, dict) and "LABEL_0" not in str(each)
    ]


def _doubled_keys(path, random):
    configs = _configs()

    def mutant():
        family = list(configs)[random.integers(len(configs))]
        text = json.dumps(configs[family])
        names = [
            place for place in _places(configs[family]) if place and isinstance(place[-1], str)
        ]
        name, value = names[random.integers(len(names))][-1], HOSTILE[random.integers(len(HOSTILE))]
        at = text.index(json.dumps(name) + ":")
        return (text[:at] + f"{json.dumps(name)}: {json.dumps(value)}, " + text[at:]).encode()

    return _config_file(path, configs, mutant)


def _misspelt(name: str, random: np.random.Generator) -> str:
    at = random.integers(len(name))
    return (
        name[:at] + name[at + 1 :],
        name[:at] + name[at] + name[at:],
        name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
        name.upper(),
        f"{name}s",
        f"new_{name}",
    )[random.integers(6)]


def _config_file(path: Path, configs: Mapping[str, Any], mutant: Callable[[], bytes]):
    """A file whose mutants must all be refused; one that can be read says something else."""
    file = path / "config.json"
    file.write_text(json.dumps(next(iter(configs.values()))))

    def read():
        hf_shape(path)
        return {"text": np.array(zlib.crc32(file.read_bytes()))}

    return file, mutant, read


def _tokenizer(path, random):
    write_directory(path, CONFIG, llama_tensors(CONFIG))
    file = path / "tokenizer.json"
    value = json.loads(file.read_text())

    def read():
        with making_sense(path), raising_panics(), contextlib.redirect_stderr(io.StringIO()):
            tokenizer = tokenizer_from_directory(path)
        tokenizer.decode(tokenizer.encode("the thin man's inn <|im_end|> é"))

    return file, _json_mutant(json.dumps(value), random), read


PIECES = [
    *("{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ messages }}", "{% if x %}"),
    *("{% endif %}", "{{ 'x' * 10 ** 9 }}", "{{ range(10 ** 9) | list }}", "{{ [0] * 10 ** 9 }}"),
    *("{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ x.y.z }}"),
    *("{{ 9 ** 9 ** 9 }}", "{% for a in range(99999) %}{% for b in range(99999) %}", "{%", "}}"),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ '%9999999999d' % 1 }}", "\x1b]0;x"),
    *("{{ messages[0].content | center(10 ** 9) }}", "{% set x = 'x' * 9999 %}", "{{ x ~ x }}"),
    *("{% include 'x' %}", "{% import 'os' as os %}", "{{ bos_token }}", "{{ lipsum(n=99999) }}"),
]


def _template(path, random):
    file = path / "chat_template.jinja"
    file.write_text(TEMPLATE)

    def mutant():
        pieces = [PIECES[i] for i in random.integers(len(PIECES), size=random.integers(1, 6))]
        at = random.integers(len(TEMPLATE))
        if random.integers(3) == 0:
            return "".join(pieces).encode()
        return (TEMPLATE[:at] + "".join(pieces) + TEMPLATE[at + random.integers(9) :]).encode()

    def read():
        made = chat_template.ChatTemplate(file.read_text(), {"bos_token": "<s>"})
        made([{"role": "user", "content": "hi"}])

    return file, mutant, read


def recipe(path, random):
    file = path / "x.toml"
    shutil.copy(Path(__file__).parents[2] / "checkpoints" / "chinchilla-70b.toml", file)
    text = file.read_text()
    original = text.encode()
    values = [str(each).encode() for each in HOSTILE]

    def mutant():
        if random.integers(2):
            return _bytes_mutant(original, np.arange(len(original)), random)()
        lines = original.splitlines()
        at = int(random.integers(len(lines)))
        key, _, _ = lines[at].partition(b"=")
        lines[at] = key + b"= " + values[random.integers(len(values))]
        return b"\n".join(lines)

    def read():
        Recipe.read(file)

    return file, mutant, read


def main() -> None:
    kind, count, *seed = sys.argv[1:]
    begin = time.monotonic()
    outcomes = run(kind, int(count), *map(int, seed))
    for outcome, times in outcomes.most_common():
        print(f"{times:8} {outcome}")
    print(f"{time.monotonic() - begin:.0f} s")
    sys.exit(bool(outcomes.keys() - {"refused", "same"}))


if __name__ == "__main__":
    main()
