"""Training runs: they learn, they end where an uninterrupted one ends, they lose nothing."""

import contextlib
import dataclasses
import itertools
import json
import shutil
import subprocess
import sys

import chex
import filelock
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import LLM, Layout
from spec_jax.errors import ConfigError, TrainingError
from spec_jax.training import memory
from spec_jax.training import run as module
from spec_jax.training.config import TrainingConfig
from spec_jax.training.examples import read_examples
from spec_jax.training.rows import RowFiles
from spec_jax.training.run import TrainingRun
from spec_jax.training.sampling import RowSampler
from tests.often import often
from tests.training.conftest import ROW

CONFIG = TrainingConfig(
    layers=1,
    reduced_vocab=64,
    sample_tokens=400,
    sequence_length=ROW,
    sample_batch=8,
    held_out=4,
    steps=12,
    batch_size=8,
    warmup_steps=2,
    learning_rate=3e-3,
    evaluate_every=3,
)


def trained(llm, path, data_file, config=CONFIG):
    examples = read_examples([data_file], llm.tokenizer, ROW)
    run = TrainingRun(llm, config, path, examples)
    reports = list(run.run())
    return run, reports, {name: np.asarray(each) for name, each in run.state.weights.items()}


@pytest.fixture(scope="module")
def finished(llm, data_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "finished"
    return path, *trained(llm, path, data_file)


def test_a_run_learns_and_reports(finished):
    path, run, reports, _ = finished
    evaluated = [each for each in reports if each.evaluated]
    assert [each.step for each in evaluated] == [3, 6, 9, 12]
    history = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in history] == [0, 3, 6, 9, 12]
    assert evaluated[-1].loss < 0.9 * evaluated[0].loss
    assert history[-1]["sampled"] > history[0]["sampled"]
    best = run.best()
    highest = max(history, key=lambda each: each["greedy"] + each["sampled"])
    assert best.acceptance == {kind: highest[kind] for kind in ("greedy", "sampled")}
    assert best.outputs.tolist() == sorted(set(best.outputs.tolist()))
    assert len(best.outputs) == CONFIG.reduced_vocab


def test_only_what_is_the_drafts_own_is_trained(finished, llm):
    _, run, _, weights = finished
    assert not [name for name in weights if name.startswith(("embed.", "head."))]
    model, target = run.best().model, llm.engine.target.unpacked()
    np.testing.assert_array_equal(model.weights["embed.weight"], target.weights["embed.weight"])
    head = np.asarray(target.weights["head.weight"])[:, run.best().outputs]
    np.testing.assert_array_equal(model.weights["head.weight"], head)


def test_the_data_is_what_the_target_says(finished, llm):
    path, _, _, _ = finished
    rows = RowFiles(sorted((path / "data").glob("train-*.safetensors"))).take([0, 1, 2])
    states = jnp.asarray(rows.states.astype(np.float32))
    logits, *_ = llm.engine.target.score(
        jnp.asarray(rows.tokens), llm.engine.target.new_cache(*rows.tokens.shape)
    )
    own = np.asarray(llm.engine.target.logits(states))
    normaliser = np.log(np.exp(own.astype(np.float64)).sum(-1))
    for row in range(3):
        end = rows.lengths[row] - 1
        np.testing.assert_allclose(rows.normalisers[row, :end], normaliser[row, :end], atol=1e-3)
        # The states are rounded to bfloat16.
        np.testing.assert_allclose(own[row, :end], logits[row, :end], atol=0.1)
    assert (rows.begins < rows.lengths).all() and (rows.lengths <= ROW).all()


class Killed(BaseException):
    """What ends a run in the middle of something."""


@pytest.mark.parametrize("at", often(range(6), [0]))
def test_a_killed_run_goes_on_to_the_same_weights(
    llm, data_file, tmp_path, monkeypatch, finished, at
):
    """Killed again and again at random moments: while data is made, in steps and in saving."""
    random = np.random.default_rng(at)
    *_, wanted = finished
    path = tmp_path / "run"
    killed = 0
    for left in itertools.chain(random.integers(1, 12, 5), [10**9]):
        calls = itertools.count()

        def dies(function, left=left, calls=calls):
            def wrapped(*args, **kwargs):
                if next(calls) == left:
                    raise Killed
                return function(*args, **kwargs)

            return wrapped

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(RowSampler, "rows", dies(RowSampler.rows))
            patch.setattr(TrainingRun, "_batch", dies(TrainingRun._batch))
            patch.setattr(module.RunStore, "save", dies(module.RunStore.save))
            _, _, found = trained(llm, path, data_file)
            break
        killed += 1
    assert killed >= 3
    chex.assert_trees_all_equal(found, wanted)
    steps = [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 3, 6, 9, 12]


def test_a_finished_run_is_not_trained_again(finished, llm, data_file):
    path, _, _, wanted = finished
    _, reports, found = trained(llm, path, data_file)
    assert reports == []
    chex.assert_trees_all_equal(found, wanted)


def test_another_run_is_refused_by_what_differs(finished, llm, data_file):
    path = finished[0]
    with pytest.raises(ConfigError, match=r"another training run: steps is 12 there and 13 here"):
        trained(llm, path, data_file, dataclasses.replace(CONFIG, steps=13))


def test_runs_share_the_rows_of_a_directory(finished, llm, data_file, tmp_path, monkeypatch):
    def sampled(*args):
        raise AssertionError("rows that are there already were sampled again")

    monkeypatch.setattr(RowSampler, "rows", sampled)
    examples = read_examples([data_file], llm.tokenizer, ROW)
    config = dataclasses.replace(CONFIG, steps=2, objective="tv", sample_tokens=200)
    data = finished[0] / "data"
    run = TrainingRun(llm, config, tmp_path / "run", examples, data_dir=data)
    assert [each.step for each in run.run() if each.evaluated] == [2]
    other = dataclasses.replace(CONFIG, temperatures=(0.5,))
    with pytest.raises(ConfigError, match=r"other training data: temperatures is \[0.0"):
        TrainingRun(llm, other, tmp_path / "other", examples, data_dir=data)


HOLD = """
import sys, filelock
lock = filelock.FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_one_process_at_a_time_trains_in_a_directory(finished, llm, data_file, tmp_path):
    shutil.copy(finished[0] / "run.json", tmp_path)
    examples = read_examples([data_file], llm.tokenizer, ROW)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process is training in"):
            TrainingRun(llm, CONFIG, tmp_path, examples)
        other.communicate("")
    TrainingRun(llm, CONFIG, tmp_path, examples)


def test_one_process_at_a_time_makes_data_in_a_directory(
    finished, llm, data_file, tmp_path, monkeypatch
):
    examples, data = read_examples([data_file], llm.tokenizer, ROW), tmp_path / "data"
    shutil.copytree(finished[0] / "data", data)
    run = TrainingRun(llm, CONFIG, tmp_path / "run", examples, data_dir=data)
    command, pipe = [sys.executable, "-c", HOLD, str(data / "lock")], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=r"makes training data in .*data; .* another --data-"):
            next(run.run())
        other.communicate("")
    training = run.run()
    assert next(training).step > 0
    with filelock.FileLock(data / "lock", timeout=0):  # who only reads data leaves it to others
        pass


def test_a_directory_of_something_else_is_refused(llm, tmp_path, data_file):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="no training run"):
        trained(llm, tmp_path, data_file)
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]


def test_a_loss_that_is_no_number_stops_at_its_step_and_keeps_the_checkpoint(
    llm, data_file, tmp_path
):
    config = dataclasses.replace(CONFIG, learning_rate=1e30, clip=1e30, warmup_steps=0)
    with pytest.raises(TrainingError, match=r"loss of step \d+ is .*step \d+ is intact"):
        trained(llm, tmp_path / "run", data_file, config)
    examples = read_examples([data_file], llm.tokenizer, ROW)
    run = TrainingRun(llm, config, tmp_path / "run", examples)
    assert run.store.latest == 0


def test_a_full_disk_stops_with_the_last_checkpoint_intact(llm, data_file, tmp_path, monkeypatch):
    real = module.RunStore.save

    def full(store, step, *args):
        if step == 6:
            raise OSError(28, "No space left on device")
        real(store, step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(module.RunStore, "save", full)
        with pytest.raises(OSError, match="No space left"):
            trained(llm, tmp_path / "run", data_file)
    run, _, _ = trained(llm, tmp_path / "run", data_file)
    assert run.store.latest == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 129}, r"sequence_length is 129, .*context of 128 tokens"),
        ({"held_out": 20}, r"holds 20 prompts .*held_out is 20"),
        ({"max_disk": 1e-9}, r"sample_tokens is 400, .* max_disk is .* tokens would fit"),
        ({"from_layers": (7,)}, r"layer 7, but the target's last layer is 1"),
        ({"width": 17, "embedding": "own"}, r"width is 17"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(llm, data_file, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        trained(llm, tmp_path / "run", data_file, dataclasses.replace(CONFIG, **changes))


def test_an_offloaded_target_is_refused(target, data_file, tmp_path):
    offloaded = LLM(target, layout=Layout.tensor_parallel(1), offload="host")
    with pytest.raises(ConfigError, match="offload is 'host', but training reads the target's"):
        trained(offloaded, tmp_path / "run", data_file)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("free", "message"),
    [
        # Of each device, when the sampling and when an update is looked at.
        (
            [1e6],
            r"sample_batch is 8, with which sampling takes 0.0\d GiB .* sample_batch 4 would fit",
        ),
        ([1e3], r"sample_batch is 8, .* no value of it would fit; take a smaller draft or target"),
        ([1e9, 6.6e5], r"accumulate is 1, with which an update takes .* accumulate 2 would fit"),
    ],
)
def test_a_batch_that_memory_does_not_hold_is_refused_before_anything_is_made(
    llm, data_file, tmp_path, monkeypatch, free, message
):
    left = iter(free)
    monkeypatch.setattr(memory, "free_memory", lambda devices: next(left))
    with pytest.raises(ConfigError, match=message):
        trained(llm, tmp_path / "run", data_file)
    assert not (tmp_path / "run").exists()


OTHERS = [
    {"width": 8, "embedding": "own", "reduced_vocab": None},
    {"width": 8, "embedding": "own"},
    {"embedding": "own", "reduced_vocab": None},
    {"reduced_vocab": None, "from_layers": (1,), "objective": "tv"},
    {"dtype": "bfloat16", "accumulate": 2, "objective": "ce"},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", often(OTHERS, OTHERS[:1]))
def test_other_drafts_learn_too(llm, data_file, tmp_path, changes):
    config = dataclasses.replace(CONFIG, **changes)
    _, reports, _ = trained(llm, tmp_path / "run", data_file, config)
    assert reports[-1].loss < reports[0].loss


@pytest.mark.slow
def test_the_target_can_invent_its_prompts(llm, tmp_path, monkeypatch):
    asked = [f"{chr(97 + i % 26)}{i // 26}" for i in range(40)]
    monkeypatch.setattr(RowSampler, "questions", lambda self, count, seed: asked[:count])
    run = TrainingRun(llm, CONFIG, tmp_path / "run")
    list(run.run())
    kept = json.loads((tmp_path / "run" / "data" / "questions.json").read_text())
    assert set(kept) <= set(asked)
    rows = RowFiles(sorted((tmp_path / "run" / "data").glob("train-*"))).take([0])
    assert llm.tokenizer.decode(rows.tokens[0].tolist()).startswith("user\n")
