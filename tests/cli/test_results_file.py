"""`spec-jax generate --out FILE --resume`: a job that was killed goes on."""

import fcntl
import json
import signal
import time

import pytest

from tests.cli.harness import KEYS, failure, finished, interrupt, output, run, spawn

PROMPTS = ["the inn", "a thin thing", "über", "in"]


@pytest.fixture
def job(tmp_path):
    """The arguments of a job, and its file of results."""
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    out = tmp_path / "results.jsonl"
    return ["generate", "--target", "t", "--prompt-file", str(source), "--out", str(out)], out


def results(file):
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    return {line["index"]: (line["prompt"], line["text"]) for line in lines}


def test_each_result_is_a_line(capsys, scripted, job):
    arguments, file = job
    scripted((1, "B", output("B")), (0, "a"), (3, "D", output("D")), (0, "", output("a")))
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (0, "") and "3 of 4 results in" in " ".join(err.split())
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["index"] for line in lines] == [1, 3, 0]  # as they finish
    assert all(line.keys() == KEYS | {"settings"} for line in lines)


def test_a_stopped_job_goes_on_with_what_is_missing(capsys, scripted, job):
    arguments, file = job
    scripted((2, "C", output("C")), interrupt, (0, "a"))
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (130, "") and "--resume continues" in err
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:20])  # a line that a killed job did not finish
    assert b"\n" not in whole[:-1] and len(whole) > 20
    chosen = scripted(*finished(3))
    code, _, err = run(capsys, *arguments, "--resume")
    assert code == 0 and "4 of 4 results in" in " ".join(err.split())
    assert chosen.prompts == ([PROMPTS[0], PROMPTS[1], PROMPTS[3]],)
    assert file.read_bytes().startswith(whole)
    texts = ["<0>", "<1>", "C", "<2>"]
    assert results(file) == dict(enumerate(zip(PROMPTS, texts, strict=True)))
    chosen = scripted()
    code, _, err = run(capsys, *arguments, "--resume")
    assert code == 0 and chosen.prompts == () and "4 of 4 results" in " ".join(err.split())


def test_requests_that_failed_are_results(capsys, scripted, job):
    arguments, file = job
    failed = output("", "error", error="prompt 0: its logits hold a NaN.")
    scripted((0, "", failed), *finished(4)[1:])
    code, _, err = run(capsys, *arguments)
    assert code == 2 and err.endswith("its logits hold a NaN.\n")
    assert json.loads(file.read_text().splitlines()[0])["error"] == failed.error


def test_another_job_is_refused(capsys, scripted, job, tmp_path):
    arguments, file = job
    chosen = scripted(*finished(4))
    assert run(capsys, *arguments)[0] == 0
    before = file.read_bytes()
    assert "exists, and nothing is overwritten; give --resume" in failure(capsys, *arguments)
    assert len(chosen.loaded) == 1  # refused before a model was loaded
    resumed = [*arguments, "--resume"]
    for changes, said in (
        (("--temperature", "0.5"), "was made with another model, other sampling"),
        (("--dtype", "float32"), "was made with another model, other sampling"),
        (("--prompt", "first"), "is not a result of this job"),
    ):
        command = [resumed[0], *changes, *resumed[1:]]
        code, out, err = run(capsys, *command)
        assert (code, out) == (2, "") and said in err
    scripted(*finished(4))
    assert run(capsys, *resumed, "--method", "prompt_lookup")[0] == 0
    for damage in (b"{}\n", b"[1]\n", b"\xff\n", b'{"index": -1}\n', b"null\n"):
        for content, line in ((before + damage, 5), (damage, 1), (b"mine\n" + damage[:-1], 1)):
            file.write_bytes(content)
            code, _, err = run(capsys, *resumed)
            assert code == 2 and f"line {line} is not a result of this job" in err
            assert file.read_bytes() == content
    file.write_bytes(before)
    with file.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code, _, err = run(capsys, *resumed)
        assert code == 2 and "is being written by another process" in err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--out", "."], "give a file in a directory that exists"),
        (["--out", "missing/out.jsonl"], "give a file in a directory that exists"),
        (["--json"], "but --out writes them to a file"),
        (["--compare"], "but --out writes them to a file"),
    ],
)
def test_what_cannot_be_done_is_refused(capsys, scripted, job, changes, said):
    chosen = scripted(*finished(4))
    assert said in failure(capsys, *job[0], *changes)
    assert not chosen.loaded


def test_resume_needs_a_file(capsys):
    assert "name it with --out" in failure(capsys, "generate", "--target", "t", "--resume", "hi")


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_killed_job_ends_as_one_that_was_not(model, job, tmp_path, temperature):
    arguments, file = job
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"the inn {i}"}) + "\n" for i in range(40)))
    flags = ["--max-tokens", "200", "--max-num-seqs", "2", "--temperature", temperature]
    flags += ["--seed", "3", "--ignore-eos"] if temperature != "0" else ["--ignore-eos"]
    arguments = [arguments[0], "--target", model, *arguments[3:], *flags]
    assert spawn(*arguments).wait() == 0
    whole = results(file)
    file.unlink()
    killed = 0
    for wanted in (1, 15, 30):
        process = spawn(*arguments, "--resume")
        while process.poll() is None:
            if file.exists() and file.read_bytes().count(b"\n") >= wanted:
                process.send_signal(signal.SIGKILL)
                killed += 1
                process.wait()
                break
            time.sleep(0.01)
    assert killed >= 2
    assert spawn(*arguments, "--resume").wait() == 0
    assert results(file) == whole and len(whole) == 40
