"""A store of outputs survives its processes, and whatever stands in it changes no token."""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from spec_jax import LLM, ConfigError, SamplingParams
from spec_jax.engine import suffix_store
from spec_jax.engine.suffix_index import END, SuffixIndex, suffix_order
from spec_jax.engine.suffix_store import StoredOutputs, SuffixStore
from tests.checkpoints import tiny
from tests.cli.harness import failure, run, spawn
from tests.often import often

VOCAB = 300


def open_store(path):
    return SuffixStore(path, None, VOCAB)


def outputs_of(store):
    """The outputs of each namespace, with its suffix array checked."""
    stored, found = store.outputs, {}
    assert stored.tokens.shape == stored.order.shape
    for namespace, (begin, count) in stored.parts.items():
        order = stored.order[begin : begin + count]
        places = np.sort(order)
        text = stored.tokens[begin : places[-1] + 2]
        assert text[-1] == END and (text != END).sum() == count
        np.testing.assert_array_equal(order, begin + suffix_order(text))
        parts = np.split(text, np.flatnonzero(text == END) + 1)[:-1]
        found[namespace] = [each[:-1].tolist() for each in parts]
    return found


def test_outputs_are_there_in_the_next_process(tmp_path):
    path = tmp_path / "folder" / "store"
    store = open_store(path)
    assert store.outputs.num_tokens == 0 and not path.exists()
    added = {"a": [[1, 2, 3], [1, 2]], "": [[9] * 5], "b": [[7]]}
    for namespace, outputs in added.items():
        for output in outputs:
            store.add(namespace, output)
    del store
    gc.collect()  # as at the end of a process
    again = open_store(path)
    assert outputs_of(again) == added
    again.add("a", [1, 2])  # it is there
    again.add("a", [4, 5])
    again.add("x" * 1000, [6])
    again.write()
    again.write()
    assert (
        outputs_of(again) == outputs_of(open_store(path)) == {**added, "a": [*added["a"], [4, 5]]}
    )
    rows = again.outputs.of_rows(["b", "nobody", "a"], 4)
    assert rows.tolist() == [
        [*again.outputs.parts["b"]],
        [0, 0],
        [*again.outputs.parts["a"]],
        [0, 0],
    ]


def test_a_store_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(suffix_store, "MAX_STORED", 40)
    monkeypatch.setattr(suffix_store, "MIN_SIZE", 8)
    for name in ("old", "new"):
        for i in range(9):
            store = open_store(tmp_path / "store")
            store.add(name, [i, i, i])
            store.write()
            assert len(store.outputs.tokens) <= 64
    assert outputs_of(store) == {"new": [[i] * 3 for i in range(9)]}
    store.add("new", [8] * 30)
    store.write()
    assert outputs_of(store) == {"new": [[7] * 3, [8] * 3, [8] * 30]}
    assert sorted(each.name for each in tmp_path.iterdir()) == [".store.lock", "store"]


def test_two_writers_keep_the_outputs_of_both(tmp_path):
    def write(number):
        for i in range(12):
            store = open_store(tmp_path / "store")
            store.add(f"writer {number}", [number, i])
            store.write()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    expected = {f"writer {n}": [[n, i] for i in range(12)] for n in range(3)}
    assert outputs_of(open_store(tmp_path / "store")) == expected


def test_a_store_that_another_process_writes_for_too_long(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(suffix_store, "MAX_WAIT", 0.1)
    store = open_store(tmp_path / "store")
    store.add("", [1])
    with suffix_store.FileLock(tmp_path / ".store.lock"):
        with pytest.raises(ConfigError, match=r"another process holds .*; try again"):
            store.write()
        del store
        gc.collect()
    assert "were not added to" in caplog.text


WRITER = """
import sys
from pathlib import Path
from spec_jax.engine.suffix_store import SuffixStore
number = int(sys.argv[2])
print("ready", flush=True)
while True:
    number += 1
    store = SuffixStore(Path(sys.argv[1]), None, 300)
    store.add("", [number % 300, number // 300 % 300] * 20)
    store.write()
"""


@pytest.mark.parametrize("kills", often([3, 50], [3]))
def test_a_writer_that_is_killed_leaves_a_store_that_can_be_read(tmp_path, kills):
    path, rng, sizes = tmp_path / "store", random.Random(0), [0]
    for number in range(kills):
        command = [sys.executable, "-c", WRITER, str(path), str(1000 * number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.02, 0.3))
            os.kill(process.pid, signal.SIGKILL)
        found = outputs_of(open_store(path)).get("", [])
        assert all(each == each[:2] * 20 for each in found)
        sizes.append(len(found))
    assert sizes == sorted(sizes) and sizes[-1] > kills


def test_another_vocabulary_is_refused(tmp_path):
    store = open_store(tmp_path / "store")
    store.add("", [1])
    store.write()
    with pytest.raises(ConfigError, match="of another vocabulary; give another file"):
        SuffixStore(tmp_path / "store", None, VOCAB + 1)


def mutants(data, count):
    """Damaged copies of a file: bits turned, bytes and numbers overwritten, cut off, put in."""
    rng = random.Random(0)
    for _ in range(count):
        mutant = bytearray(data)
        header = 8 + int.from_bytes(data[:8], "little")
        for _ in range(rng.choice((1, 1, 2, 8))):
            if not mutant:
                break
            at = rng.randrange(len(mutant) if rng.random() < 0.5 else min(header, len(mutant)))
            kind = rng.randrange(5)
            if kind == 0:
                mutant[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                mutant[at : at + 4] = rng.randbytes(4)
            elif kind == 2:
                del mutant[at : at + rng.choice((1, 4, 100, len(mutant)))]
            elif kind == 3:  # a number that may stand there
                at = header + 4 * rng.randrange(max(1, (len(mutant) - header) // 4))
                mutant[at : at + 4] = rng.randrange(100).to_bytes(4, "little")
            else:
                mutant[at:at] = rng.randbytes(rng.choice((1, 4, 64)))
        yield bytes(mutant)


PROMPTS = ["the thin thing in the", "a", "and then the end of the the the"]
# The penalty keeps a tiny model from repeating itself, so that drafts come from past outputs.
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True, repetition_penalty=1.5)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "target"
    return str(tiny.write_directory(path, tiny.CONFIG, tiny.llama_tensors(tiny.CONFIG)))


@pytest.fixture(scope="module")
def plain(directory):
    return LLM(directory)


@pytest.fixture(scope="module")
def texts(plain):
    return [each.token_ids for each in plain.generate(PROMPTS, GREEDY)]


def config(path):
    return {"method": "suffix", "draft_length_policy": "constant", "suffix_store": str(path)}


@pytest.fixture(scope="module")
def learnt(plain, texts, tmp_path_factory):
    """A store with the texts of a process that has ended, and the rounds that it took."""
    path = tmp_path_factory.mktemp("stores") / "store"
    llm = plain.with_speculation(config(path))
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [each.token_ids for each in outputs] == texts
    del llm
    gc.collect()
    return path, [each.metrics.rounds for each in outputs]


def test_the_next_process_says_the_same_in_fewer_rounds(plain, texts, learnt):
    path, rounds = learnt
    outputs = plain.with_speculation(config(path)).generate(PROMPTS, GREEDY)
    assert [each.token_ids for each in outputs] == texts
    for before, after in zip(rounds, outputs, strict=True):
        assert after.metrics.rounds < before / 2
    other = SamplingParams(**(vars(GREEDY) | {"namespace": "other"}))
    outputs = plain.with_speculation(config(path)).generate(PROMPTS, other)
    assert [each.metrics.rounds for each in outputs] == rounds


@pytest.mark.parametrize("count", often([150, 1000], [150]))
def test_a_damaged_store_is_refused_or_changes_no_token(plain, texts, learnt, tmp_path, count):
    path, refused, loaded = tmp_path / "store", 0, []
    for mutant in mutants(learnt[0].read_bytes(), count):
        path.write_bytes(mutant)
        try:
            store = SuffixStore(path, plain.tokenizer, tiny.CONFIG["vocab_size"])
        except ConfigError as error:
            assert str(path) in str(error) and "give another file" in str(error)
            refused += 1
            continue
        loaded.append(mutant)
        index = SuffixIndex()
        store.outputs.add_to(index)  # as a writer does
        assert StoredOutputs.of(index).num_tokens <= len(store.outputs.tokens)
    assert refused > count // 4 and len(loaded) > count // 20
    compiled = plain.with_speculation(config(learnt[0])).engine.compiler
    for mutant in loaded[:: max(1, len(loaded) // 12)]:
        path.write_bytes(mutant)
        llm = plain.with_speculation(config(path))
        llm.engine.compiler = compiled
        assert [each.token_ids for each in llm.generate(PROMPTS, GREEDY)] == texts


def test_a_file_that_is_no_store(plain, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ConfigError, match=r"notes\.txt.* cannot be read as a suffix store"):
        plain.with_speculation(config(path))
    with pytest.raises(ConfigError, match="cannot be read as a suffix store"):
        plain.with_speculation(config(tmp_path))
    path.write_bytes(b"x" * (suffix_store.MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="more than 8388608 bytes"):
        plain.with_speculation(config(path))


def test_a_store_made_of_texts(directory, plain, texts, tmp_path, capsys):
    path = tmp_path / "store"
    lines = [{"token_ids": list(texts[0])}, {"text": "the end"}]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (tmp_path / "notes.txt").write_text("the thin thing")
    files = [str(tmp_path / name) for name in ("answers.jsonl", "notes.txt")]
    flags = "--target", directory
    code, out, _ = run(capsys, "store", path, *files, *flags, "--namespace", "n")
    assert code == 0
    store = SuffixStore(path, plain.tokenizer, tiny.CONFIG["vocab_size"])
    expected = [
        list(texts[0]),
        plain.tokenizer.encode("the end"),
        plain.tokenizer.encode("the thin thing"),
    ]
    assert outputs_of(store) == {"n": expected}
    assert f"{store.outputs.num_tokens} tokens" in out
    (tmp_path / "answers.jsonl").write_text('{"token_ids": [100000]}\n')
    assert "line 1 of" in failure(capsys, "store", path, files[0], *flags)
    said = failure(capsys, "store", path, files[1], *flags, "--namespace", "n" * 257)
    assert said == "--namespace has 257 characters; give at most 256."
    assert "namespace 'n'" in run(capsys, "store", path, *flags)[1]


def test_a_command_adds_what_it_said(directory, plain, tmp_path):
    path = tmp_path / "store"
    flags = ["--method", "suffix", "--suffix-store", path, "--ignore-eos", "--temperature", "0"]
    flags += ["--target", directory, "--max-tokens", "8"]
    with spawn("generate", *flags, PROMPTS[0]) as process:
        assert process.wait() == 0
    store = SuffixStore(path, plain.tokenizer, tiny.CONFIG["vocab_size"])
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    assert outputs_of(store) == {"": [list(plain.generate(PROMPTS[0], greedy)[0].token_ids)]}
