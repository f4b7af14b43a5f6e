"""Processes that decode together: two on this machine, two emulated devices each, over gloo."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chex
import ml_dtypes
import pytest

from spec_jax import checkpoints, distributed
from spec_jax.cli import main
from spec_jax.distributed.roll_call import call_roll
from spec_jax.distributed.watch import Watch
from spec_jax.errors import PEER_LOST, ConfigError, JoinError
from spec_jax.sharding import Layout
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory
from tests.often import often
from tests.pairs import write_model
from tests.vocabularies import vocabulary

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = str(ROOT / "sharding" / "cpu-2x2.toml")
SPEC_JAX = (sys.executable, "-m", "spec_jax")
REGEX = "[a-c]{3,5}( [0-9]{2}){2}"
CONFIG_LONG = CONFIG | {"max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny"
    return str(write_directory(path, CONFIG_LONG, llama_tensors(CONFIG_LONG)))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = [f"the {i} in a {'thin ' * (i % 4)}th" for i in range(20)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(path)


def start(number: int, count: int, port: int, *arguments: str, command=SPEC_JAX):
    own = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(number),
    }
    return subprocess.Popen(
        [*command, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | own,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def together():
    """Starts two processes, with separate arguments if `other` is given; ends both in any case."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, other: tuple[str, ...] | None = None, command=SPEC_JAX):
        port = free_port()
        several = (arguments, arguments if other is None else other)
        for i, each in enumerate(several):
            started.append(start(i, 2, port, *each, command=command))
        return started

    yield run
    for process in started:
        process.kill()
        process.communicate()


def generate(model: str, *more: str) -> tuple[str, ...]:
    return ("generate", "--target", model, "--layout", LAYOUT, *more)


def records(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


SAMPLED = ("--temperature", "0.8", "--seed", "7", "--json")
COMMANDS = """
import json, sys
from spec_jax.cli import main

for arguments in json.loads(sys.argv[1]):
    code = main(arguments)
    if code:
        sys.exit(code)
"""


def test_two_processes_do_what_one_does(capsys, model, prompts, tmp_path):
    saved = str(tmp_path / "saved")
    write = ("convert", model, saved, "--layout", LAYOUT)
    options = (*SAMPLED, "--prompt-file", prompts, "--max-tokens", "12")
    ours, theirs = of_two_and_of_one(capsys, model, (*options, "--method", "prompt_lookup"), write)
    assert len(ours) == 20
    assert [each["token_ids"] for each in ours] == [each["token_ids"] for each in theirs]
    before, after = (checkpoints.load(path).model for path in (model, saved))
    chex.assert_trees_all_equal(before.params, after.params)


@pytest.mark.slow
def test_a_file_of_results_is_the_first_processes(together, model, prompts, tmp_path):
    """Each process is given a path; a second run resumes what the first process wrote."""
    out, other = (str(tmp_path / name) for name in ("out.jsonl", "other.jsonl"))
    job = generate(model, "--prompt-file", prompts, "--max-tokens", "24", "--resume", "--out")
    for process in together(*job, out, other=(*job, other)):
        assert process.wait(300) == 0, process.stderr.read()
    assert not Path(other).exists()
    whole = records(Path(out).read_text())
    assert sorted(each["index"] for each in whole) == list(range(20))
    lines = Path(out).read_bytes().splitlines(keepends=True)
    Path(out).write_bytes(b"".join(lines[:7]))
    again = together(*job, out, other=(*job, other))[-2:]
    for process in again:
        assert process.wait(300) == 0, process.stderr.read()
    assert len(records(Path(out).read_text())) == 20
    texts = [
        {each["index"]: each["text"] for each in found}
        for found in (whole, records(Path(out).read_text()))
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_two_processes_draft_by_text_as_one_does(capsys, model, prompts, tmp_path):
    """Under a grammar, too: hosts have a say in both."""
    draft = write_model(tmp_path / "draft", vocabulary("sentencepiece"))
    text = (*SAMPLED, "--prompt-file", prompts, "--max-tokens", "12", "--draft", draft)
    text = (*text, "--method", "universal_text", "--regex", REGEX, "--max-num-seqs", "20")
    text = (*text, "--draft-length-policy", "heuristic", "--num-speculative-tokens", "3")
    ours, theirs = of_two_and_of_one(capsys, model, text)
    assert [each["token_ids"] for each in ours] == [each["token_ids"] for each in theirs]
    whole = [each for each in ours if each["finish_reason"] == "stop"]
    assert whole and all(re.fullmatch(REGEX, each["text"]) for each in whole)
    assert sum(each["metrics"]["draft_tokens"] for each in ours) > 0


def of_two_and_of_one(capsys, model, options, *commands):
    """What two processes generate together, and one alone; the two run further commands, too."""
    several = json.dumps([generate(model, *options), *commands])
    port = free_port()
    command = (sys.executable, "-c", COMMANDS, several)
    processes = [start(i, 2, port, command=command) for i in range(2)]
    (results, errors), (silence, other_errors) = (
        process.communicate(timeout=400) for process in processes
    )
    assert [process.returncode for process in processes] == [0, 0], errors + other_errors
    assert silence == ""
    assert main(["generate", "--target", model, *options]) == 0
    return records(results), records(capsys.readouterr().out)


@pytest.mark.slow
def test_another_prompt_is_caught_before_decoding(together, model):
    first, second = together(
        *generate(model, "the inn", "--seed", "1"), other=generate(model, "the end", "--seed", "1")
    )
    out, errors = first.communicate(timeout=120)
    other_out, other_errors = second.communicate(timeout=20)
    assert (first.returncode, second.returncode) == (2, 2)
    assert out == other_out == "" and "spec-jax" not in other_errors
    assert "process 1 of 2 differs from the rest in prompts" in errors


DIFFER = """
import importlib.metadata, json, psutil, sys, types
from spec_jax import checkpoints, distributed
from spec_jax.errors import ConfigError, DisagreementError
from spec_jax.sharding import Layout
from spec_jax.training import memory

layout = Layout.read(sys.argv[1])
distributed.start(layout)
number, _ = distributed.process()
place = lambda config: layout.place("target", config.axis_sizes)
model = checkpoints.load(sys.argv[2], place=place).model
said = []

def note(kind, act):
    try:
        said.append(act())
    except kind as error:
        said.append(str(error))

def fail(kind):
    raise kind(f"from {number}")

note((), lambda: distributed.gather([number, "x" * 300 * number]))
note((), lambda: distributed.from_first(lambda: number))
for kind in (ConfigError, OSError):
    note(kind, lambda: distributed.from_first(lambda: fail(kind)))
of_package = importlib.metadata.version
for name in ("jinja2", "llguidance", "tokenizers", "transformers"):
    importlib.metadata.version = lambda each: "0" if number and each == name else of_package(each)
    note(DisagreementError, lambda: distributed.agree({}))
importlib.metadata.version = of_package
note(DisagreementError, lambda: checkpoints.load(sys.argv[2 + number], place=place))
psutil.virtual_memory = lambda: types.SimpleNamespace(available=[9, 3][number] << 30)
check = lambda needed: memory.check_fits(model, "it", "rows", 4, [2, 1], needed)
note(ConfigError, lambda: check(lambda rows: rows << 29))  # 2 GiB, 1 GiB, half of one
note(ConfigError, lambda: check(lambda rows: rows << (27 + 2 * number)))
note((), lambda: check(lambda rows: rows << 28))
print(json.dumps(said), flush=True)
"""


@pytest.mark.slow
def test_what_differs_between_hosts_is_decided_once_or_refused(model, tmp_path):
    tensors = {name: 2 * each for name, each in llama_tensors(CONFIG_LONG).items()}
    other = str(write_directory(tmp_path / "tiny", CONFIG_LONG, tensors))
    command = [sys.executable, "-c", DIFFER, LAYOUT, model, other]
    port = free_port()
    processes = [start(i, 2, port, command=command) for i in range(2)]
    said = []
    for process in processes:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        said.append(json.loads(out.splitlines()[-1]))
    assert said[0] == said[1]
    gathered, first, *failed = said[0][:4]
    assert gathered == [[0, ""], [1, "x" * 300]] and first == 0 and failed == ["from 0"] * 2
    packages = ("jinja2", "llguidance", "tokenizers", "transformers")
    for name, message in zip(packages, said[0][4:8], strict=True):
        assert f"process 1 of 2 differs from the rest in the version of {name}: 0 " in message
    assert "process 1 of 2 differs from the rest in the files of tiny" in said[0][8]
    # The second has 1.5 GiB for each of its devices, the first three times as much.
    for message in said[0][9:11]:
        assert "takes 2.00 GiB" in message and "1.50 GiB are free; rows 2 would fit" in message
    assert said[0][11] is None


@pytest.mark.parametrize("victims", [[0, 1], [0], [1]])
@pytest.mark.slow
def test_sigterm_ends_all_within_seconds(together, model, victims):
    endless = ("--max-tokens", "4000", "--ignore-eos", "the inn")
    processes = together(*generate(model, *endless))
    assert processes[0].stdout.read(1)  # it has begun to decode
    begin = time.monotonic()
    for victim in victims:
        processes[victim].terminate()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode != 0
    assert time.monotonic() - begin < 10


def test_a_peer_that_never_comes_is_named(model):
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_JAX_JOIN_SECONDS", "1")
        alone = [start(i, 2, port, *generate(model, "the inn")) for i in (0,)]
        other = [start(i, 2, free_port(), *generate(model, "the inn")) for i in (1,)]
    said = [process.communicate(timeout=120)[1] for process in alone + other]
    assert [process.returncode for process in alone + other] == [
        PEER_LOST
    ] * 2  # may be tried again
    assert "process 1 of 2 did not join within 1 s" in said[0]
    assert "process 0 did not answer at 127.0.0.1:" in said[1]
    assert all("Start all processes of a run" in each and "Traceback" not in each for each in said)


def roll_call(numbers, count, seconds, its_count=None) -> dict[int, str]:
    """What each of some processes learns from a roll call; threads stand for them."""
    address, found = f"127.0.0.1:{free_port()}", {}

    def call(place, number):
        try:
            call_roll(address, number, its_count if number and its_count else count, seconds)
            found[place] = "here"
        except ConfigError as error:
            found[place] = str(error)
            late = "did not join" in found[place] or "did not answer" in found[place]
            assert isinstance(error, JoinError) == late

    threads = [threading.Thread(target=call, args=each) for each in enumerate(numbers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return found


@pytest.mark.parametrize(
    ("address", "variable", "seconds"),
    [
        ("127.0.0.1:1234", None, 60),
        ("localhost:1234", None, 60),
        ("pod-0.spec-jax:1234", None, 300),
        ("pod-0.spec-jax:1234", "90", 90),
    ],
)
def test_hosts_of_a_pod_have_more_time_to_come(monkeypatch, address, variable, seconds):
    def call(address, number, count, limit):
        raise JoinError(f"{number} of {count} within {limit}")

    monkeypatch.setattr(distributed, "call_roll", call)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    monkeypatch.delenv("JAX_NUM_PROCESSES", raising=False)
    monkeypatch.delenv("SPEC_JAX_JOIN_SECONDS", raising=False)
    if variable:
        monkeypatch.setenv("SPEC_JAX_JOIN_SECONDS", variable)
    with pytest.raises(JoinError, match=f"0 of 2 within {seconds}$"):
        distributed.start(Layout.read(ROOT / "sharding/cpu-2x2.toml"))


def test_a_roll_call():
    assert roll_call(range(5), 5, 60) == dict.fromkeys(range(5), "here")
    for said in roll_call([0, 2], 5, 2).values():
        assert said.startswith("processes 1, 3, 4 of 5 did not join within 2 s. Start all")
    for said in roll_call([1, 2], 3, 1).values():
        assert said.startswith("process 0 did not answer at 127.0.0.1:")
    assert "two processes have the number 1" in roll_call([0, 1, 1], 4, 3)[0]
    for said in roll_call([0, 1], 2, 3, its_count=3).values():
        assert said.startswith("process 1 of 3 reports to a run of 2")


def test_a_roll_call_is_not_disturbed_by_strangers():
    port, said = free_port(), []
    thread = threading.Thread(target=lambda: said.append(call_roll(f"[::]:{port}", 0, 2, 30)))
    thread.start()
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"spec-jax\n", b"spec-jax x y\n", b"\xff" * 9000, b""):
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as it:
                it.sendall(text)
                break
    call_roll(f"127.0.0.1:{port}", 1, 2, 30)
    thread.join(timeout=60)
    assert said == [None]


class Board:
    """A key-value store whose process can stop, so that whoever asks it waits."""

    def __init__(self):
        self.signs, self.running = {}, threading.Event()
        self.running.set()

    def key_value_set(self, key, value, allow_overwrite=False):
        self.running.wait()
        assert allow_overwrite
        self.signs[key] = value

    def key_value_dir_get(self, key):
        self.running.wait()
        return [(name, text) for name, text in self.signs.items() if name.startswith(key)]


def stop(board, watches):
    watches[2].board = Board()  # nobody sees its signs


def stop_and_lose_the_store(board, watches):
    stop(board, watches)
    time.sleep(0.3)
    board.running.clear()


CHANGES = {
    "process 2 stops": stop,
    "the store stops": lambda board, watches: board.running.clear(),
    "process 2 stops, then the store": stop_and_lose_the_store,
    "process 1 leaves": lambda board, watches: watches[1].leave(),
    "process 0 leaves": lambda board, watches: watches[0].leave(),
}


def watched_during(change) -> list[list[str]]:
    """What three processes say that watch each other while something changes."""
    board, said = Board(), [[], [], []]
    watches = [Watch(board, each, 3, said[each].append, beat=0.05) for each in range(3)]
    time.sleep(1)
    before = [list(each) for each in said]
    change(board, watches)
    time.sleep(2)
    board.running.set()
    for watch in watches:
        watch.leave()
    assert before == [[], [], []]
    return said


@pytest.fixture(scope="module")
def watched() -> dict[str, list[list[str]]]:
    """What processes say during each change: all changes at once, since most of it is waiting."""
    with ThreadPoolExecutor(len(CHANGES)) as pool:
        return dict(zip(CHANGES, pool.map(watched_during, CHANGES.values()), strict=True))


def test_a_peer_that_stops_is_named(watched):
    first, second, third = watched["process 2 stops"]
    for number, said in enumerate((first, second)):
        assert said == [
            f"process {number} of 3 ends: process 2 gave no sign of life for 0.75 s; it has ended, "
            "was stopped or cannot be reached."
        ]
    assert "process 1 gave" in third[0]  # nor does it see theirs


def test_without_the_store_process_0_is_named(watched):
    first, *others = watched["the store stops"]
    assert all("ends: process 0 gave no sign" in said for (said,) in others)
    assert len(first) == 1  # a real store stops with process 0


def test_without_the_store_nothing_is_said_of_the_others(watched):
    """Even if the last sign of one of them is older than the store's last answer."""
    assert "ends: process 0 gave no sign" in watched["process 2 stops, then the store"][1][0]


@pytest.mark.parametrize("number", [1, 0])
def test_a_peer_that_has_left_is_not_missed(watched, number):
    assert watched[f"process {number} leaves"] == [[], [], []]


def test_a_port_that_never_answered_says_nothing_of_process_0():
    said = []
    address = f"127.0.0.1:{free_port()}"
    watch = Watch(Board(), 1, 1, said.append, beat=0.05, address=address)
    time.sleep(0.5)
    watch.leave()
    assert said == []


BUSY = """
import sys, time
from spec_jax import distributed
from spec_jax.sharding import Layout

distributed.start(Layout.read(sys.argv[1]))
print("joined", flush=True)
time.sleep(60)  # as if it compiled: it waits for no other process
"""


def test_process_0_ends_those_that_do_not_wait_for_it(together):
    processes = together(LAYOUT, command=(sys.executable, "-c", BUSY))
    assert [each.stdout.readline() for each in processes] == ["joined\n"] * 2
    time.sleep(1)
    processes[0].kill()
    _, errors = processes[1].communicate(timeout=20)
    assert processes[1].returncode == PEER_LOST
    last = errors.strip().splitlines()[-1]
    assert last == "spec-jax: error: process 1 of 2 ends: process 0 has ended."


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_ends_the_other(together, model, victim):
    code, errors, seconds = kill(together, model, victim, signal.SIGSTOP)
    assert code == PEER_LOST and seconds < 20
    last = errors.strip().splitlines()[-1]
    assert f"process {1 - victim} of 2 ends: process {victim} gave no sign of life" in last


@pytest.mark.slow
def test_all_may_be_stopped_together_and_go_on(together, model):
    processes = together(*generate(model, "--max-tokens", "4000", "--ignore-eos", "the inn"))
    assert processes[0].stdout.read(1)
    for how, seconds in ((signal.SIGSTOP, 20), (signal.SIGCONT, 20)):
        for process in processes:
            process.send_signal(how)
        time.sleep(seconds)
    assert processes[0].stdout.read(1)
    assert all(process.poll() in (None, 0) for process in processes)


def kill(
    together, model: str, victim: int, how: signal.Signals = signal.SIGKILL
) -> tuple[int, str, float]:
    """Kills one of two while they decode: how the other ends, what it says and after how long."""
    endless = ("--max-tokens", "4000", "--ignore-eos", "the inn")
    processes = together(*generate(model, *endless))
    assert processes[0].stdout.read(1)  # it has begun to decode
    processes[victim].send_signal(how)
    begin = time.monotonic()
    survivor = processes[1 - victim]
    _, errors = survivor.communicate(timeout=60)
    return survivor.returncode, errors, time.monotonic() - begin


@pytest.mark.parametrize("victim", often([0, 1], [1]))
def test_a_dead_process_ends_the_other(together, model, victim):
    code, errors, seconds = kill(together, model, victim)
    assert code == PEER_LOST and seconds < 20
    last = errors.strip().splitlines()[-1]
    assert last.startswith(f"spec-jax: error: process {1 - victim} of 2 ends: process {victim} ")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1] * 5)
def test_a_dead_process_always_ends_the_other(together, model, victim):
    test_a_dead_process_ends_the_other(together, model, victim)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_NUM_PROCESSES": "3"}, "is for 2 processes, and JAX_NUM_PROCESSES is 3"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is 'two'; give an integer"),
        ({}, "set JAX_COORDINATOR_ADDRESS to host:port of process 0"),
    ],
)
def test_a_start_that_cannot_work_says_what_would(model, variables, message):
    result = subprocess.run(
        [*SPEC_JAX, *generate(model, "the inn")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | variables,
    )
    assert result.returncode == 2 and message in result.stderr


WIDE = CONFIG | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "num_hidden_layers": 8,
    "vocab_size": 8192,
}
MEASURE = """
import sys
from pathlib import Path
import jax
from spec_jax import checkpoints, distributed
from spec_jax.sharding import Layout

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

layout = Layout.read(sys.argv[2])
distributed.start(layout)
place = lambda config: layout.place("target", config.axis_sizes)
checkpoints.load(sys.argv[3], dtype="bfloat16", place=place)  # what loading imports is no weight
before = kilobytes("VmRSS")
model = checkpoints.load(sys.argv[1], dtype="bfloat16", place=place).model
peak = kilobytes("VmHWM") - before
leaves = jax.tree.leaves(model.params)
own = sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards)
print(peak * 1024, own, max(leaf.nbytes for leaf in leaves), sum(leaf.nbytes for leaf in leaves))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="it tells this process's memory")
@pytest.mark.slow
def test_no_process_holds_the_whole_model(tmp_path, model):
    tensors = llama_tensors(WIDE, ml_dtypes.bfloat16)
    path = write_directory(tmp_path / "wide", WIDE, tensors)
    layout = tmp_path / "across.toml"
    text = (ROOT / "sharding" / "cpu-2x2.toml").read_text()
    layout.write_text(text.replace("data = 2\nmodel = 2", "data = 1\nmodel = 4"))
    command = [sys.executable, "-c", MEASURE, str(path), str(layout), model]
    port = free_port()
    processes = [start(i, 2, port, command=command) for i in range(2)]
    for process in processes:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        peak, own, largest, whole = map(int, out.splitlines()[-1].split())
        assert own < 0.51 * whole
        assert peak < 1.5 * own + largest, (peak, own, largest, whole)
