"""The command line as a user meets it: what it prints, where, and how it ends."""

import contextlib
import dataclasses
import inspect
import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest

from spec_jax import LLM, RequestOutput, SamplingParams, SpeculativeConfig, __version__
from spec_jax.cli import arguments, main
from spec_jax.cli.arguments import parse_model_command
from spec_jax.cli.screen import visible
from spec_jax.outputs import SpeculativeMetrics, StreamChunk, Usage
from tests.checkpoints import tiny

KEYS = {"text", "token_ids", "finish_reason", "usage", "metrics"}
ESCAPE = "\x1b"
CONFIG = {**tiny.CONFIG, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny.write_directory(tmp_path_factory.mktemp("model") / "target", CONFIG))


def run(capsys, *argv) -> tuple[int, str, str]:
    code = main([str(each) for each in argv])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def failure(capsys, *argv) -> str:
    """The message of a run that must fail without printing a result."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("spec-jax: error: ") and err.count("\n") == 1
    return err.removeprefix("spec-jax: error: ").strip()


def spawn(*argv, **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "spec_jax", *map(str, argv)], **options)


class Stdin(io.TextIOWrapper):
    """Standard input that holds some bytes, from a pipe or from a terminal."""

    def __init__(self, data: str | bytes, terminal: bool = False):
        super().__init__(io.BytesIO(data if isinstance(data, bytes) else data.encode()), "utf-8")
        self.isatty = lambda: terminal


def output(text: str, finish_reason="stop", *, prompt_tokens=5, error=None) -> RequestOutput:
    tokens = tuple(text.encode())
    metrics = SpeculativeMetrics(2, 8, 3, (2, 1, 0, 0), 0.5, 0.25, 0.0, len(tokens))
    usage = Usage(prompt_tokens, len(tokens))
    return RequestOutput(None, text, tokens, finish_reason, usage, metrics, error)


class Scripted(LLM):
    """Answers from a script: pieces of text, exceptions to raise, results, functions to call."""

    script: tuple = ()
    loaded: tuple = ()
    prompts: tuple = ()
    tokenizer = SimpleNamespace(encode_chat=lambda messages: [len(m["content"]) for m in messages])

    def __init__(self, target, **arguments):
        type(self).loaded = (*self.loaded, (target, arguments))
        self.max_num_seqs, self.max_model_len = 8, arguments.get("max_model_len", 100)
        self.engine = SimpleNamespace(compile_seconds=1.5)

    def stream(self, prompts, sampling_params=None):
        type(self).prompts = (*self.prompts, prompts)
        for step in self.script:
            if isinstance(step, BaseException):
                raise step
            if callable(step):
                step()
            else:
                index, text, result = (*step, None)[:3]
                yield StreamChunk(index, text, tuple(text.encode()), result)


@pytest.fixture
def scripted(monkeypatch):
    """Lets `spec-jax` run a script instead of a model."""

    def use(*script) -> type[Scripted]:
        chosen = type("Chosen", (Scripted,), {"script": script})
        monkeypatch.setattr("spec_jax.cli.loading.LLM", chosen)
        return chosen

    return use


# Flags.

ALL_FLAGS = shlex.split("""
    --target t --draft d --method draft_model --num-speculative-tokens 7 --lookahead constant
    --verification greedy --prompt-lookup-max 5 --max-tokens 9 --temperature 0.0 --top-k 3
    --top-p 0.5 --min-p 0.25 --repetition-penalty 1.5 --presence-penalty -0.5
    --frequency-penalty 0.125 --stop a --stop b --ignore-eos --seed 11 --dtype bfloat16
    --max-model-len 99 --max-num-seqs 2 --json --compare --debug --chat --prompt p
    --prompt-file f positional
""")


def test_flags_become_config_objects():
    options = parse_model_command("generate", ALL_FLAGS)
    assert options.speculative == SpeculativeConfig(
        method="draft_model",
        draft="d",
        num_speculative_tokens=7,
        lookahead="constant",
        verification="greedy",
        prompt_lookup_max=5,
    )
    assert options.sampling == SamplingParams(
        max_tokens=9,
        temperature=0.0,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.125,
        stop=("a", "b"),
        ignore_eos=True,
        seed=11,
    )
    assert options.llm == {"dtype": "bfloat16", "max_model_len": 99, "max_num_seqs": 2}
    assert options.sources == (("text", "positional"), ("text", "p"), ("file", "f"))
    assert (options.target, options.chat, options.json, options.compare) == ("t", True, True, True)


def test_what_is_not_given_is_left_to_the_config_objects():
    options = parse_model_command("generate", ["--target", "t"])
    assert (options.speculative, options.sampling) == (SpeculativeConfig(), SamplingParams())
    assert options == arguments.Options("t", SpeculativeConfig(), SamplingParams(), {})


def test_a_draft_alone_chooses_the_method():
    given = ["--target", "t", "--draft", "d"]
    assert parse_model_command("generate", given).speculative.method == "draft_model"


@pytest.mark.parametrize("flags, chat", [("--chat --raw", False), ("--raw --chat", True)])
def test_the_last_of_chat_and_raw_wins(flags, chat):
    assert parse_model_command("generate", ["--target", "t", *flags.split()]).chat is chat


def test_help_names_every_flag_and_the_true_defaults(capsys):
    code, out, _ = run(capsys, "generate", "--help")
    assert code == 0
    assert {flag for flag in ALL_FLAGS if flag.startswith("--")} <= set(
        re.findall(r"--[\w-]+", out)
    )
    text = " ".join(out.split())
    defaults = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
    defaults |= {f.name: f.default for f in dataclasses.fields(SpeculativeConfig)}
    llm = inspect.signature(LLM.__init__).parameters
    llm_defaults = {name: llm[name].default for name in ("dtype", "max_num_seqs")}
    defaults |= llm_defaults
    for name in ("max_tokens", "top_p", "num_speculative_tokens", "method", *llm_defaults):
        flag, value = f"--{name.replace('_', '-')}", re.escape(str(defaults[name]))
        assert re.search(rf"{flag} .{{0,120}}\(default: {value}\)", text), name


def test_overview_and_version(capsys):
    assert run(capsys, "--version") == (0, f"spec-jax {__version__}\n", "")
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "") and "spec-jax generate" in out
    assert run(capsys) == (2, "", out)


# Mistakes.

MISTAKES = [
    ("--temperature -1", ["temperature is -1.0"]),
    ("--temperature nan", ["temperature is nan"]),
    ("--temperature warm", ["--temperature", "'warm' is not a number"]),
    ("--top-p 0", ["top_p is 0.0", "(0, 1]"]),
    ("--top-p 1.5", ["top_p is 1.5", "(0, 1]"]),
    ("--min-p 2", ["min_p is 2.0"]),
    ("--top-k 1.5", ["--top-k", "'1.5' is not a whole number"]),
    ("--num-speculative-tokens 0", ["num_speculative_tokens is 0", "at least 1"]),
    ("--max-tokens 0", ["max_tokens is 0"]),
    ("--max-model-len 0", ["max_model_len is 0"]),
    ("--max-num-seqs 0", ["max_num_seqs is 0"]),
    ("--seed -1", ["seed is -1"]),
    ("--repetition-penalty 0", ["repetition_penalty is 0.0"]),
    ("--method lookup", ["method is 'lookup'", "prompt_lookup"]),
    ("--method draft_model", ["--draft"]),
    ("--method prompt_lookup --draft d", ["draft is 'd'", "draft_model"]),
    ("--verification gredy", ["verification is 'gredy'", "Did you mean 'greedy'?"]),
    ("--verification greedy --temperature 1", ["'greedy'", "temperature is 1.0", "'token'"]),
    ("--lookahead constnt", ["lookahead is 'constnt'", "Did you mean 'constant'?"]),
    ("--dtype float31", ["dtype is 'float31'", "Did you mean 'float32'?"]),
    ("--tempratur 1", ["'--tempratur'", "Did you mean '--temperature'?"]),
    ("--num-spec 1", ["'--num-spec'", "Did you mean '--num-speculative-tokens'?"]),
    ("--zzz", ["'--zzz'", "spec-jax generate --help"]),
    ("more words", ["'more'", "quote"]),
    ("--top-k", ["--top-k", "expected one argument"]),
    ("--prompt-file missing.txt", ["'missing.txt'", "No such file"]),
]


@pytest.mark.parametrize("flags, expected", MISTAKES, ids=[flags for flags, _ in MISTAKES])
def test_a_mistake_names_the_value_before_anything_is_loaded(capsys, scripted, flags, expected):
    llm = scripted()
    message = failure(capsys, "generate", "--target", "t", "a prompt", *flags.split())
    assert all(part in message for part in expected), message
    assert not llm.loaded


def test_other_mistakes_on_the_command_line(capsys):
    assert "--target" in failure(capsys, "generate", "a prompt")
    assert "Did you mean 'generate'?" in failure(capsys, "generat", "a prompt")
    assert "'a prompt'" in failure(capsys, "a prompt")
    assert "the command comes first" in failure(capsys, "--target", "t", "generate")
    assert "stop holds ''" in failure(capsys, "chat", "--target", "t", "--stop", "")
    assert "'--prompt'" in failure(capsys, "chat", "--target", "t", "--prompt", "hi")
    assert "'--jsn'" in failure(capsys, "env", "--jsn")


def test_mistakes_do_not_wait_for_jax():
    code = (
        "import sys; from spec_jax.cli import main;"
        "code = main(['generate', '--target', 't', '--top-p', '2', 'hi']);"
        "assert not {'jax', 'rich', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "spec-jax: error: top_p is 2.0; give a number in (0, 1].\n"


@pytest.fixture
def bad(tmp_path):
    """Writes a checkpoint and damages it."""

    def write(config=None, tensors=None, truncate=False) -> str:
        path = tiny.write_directory(tmp_path / "bad", CONFIG | (config or {}), tensors)
        if truncate:
            file = path / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-100])
        return str(path)

    return write


def test_bad_checkpoints(capsys, bad):
    def message(target) -> str:
        return failure(capsys, "generate", "--target", target, "hi")

    assert "no/such/place.gguf" in message("no/such/place.gguf")
    assert "model.safetensors" in message(bad(truncate=True))
    tensors = tiny.llama_tensors(CONFIG)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    assert "model.norm.weight" in message(bad(tensors=tensors))
    assert "'lama'" in message(bad({"model_type": "lama"}))


def test_a_draft_of_another_tokenizer(capsys, model, tmp_path):
    draft = tiny.write_directory(tmp_path / "draft", CONFIG)
    tokens = list(tiny.TOKENS)
    first, second = tokens.index("A"), tokens.index("B")
    tokens[first], tokens[second] = "B", "A"
    tiny.write_tokenizer(draft, tokens)
    message = failure(capsys, "generate", "--target", model, "--draft", draft, "hi")
    assert f"{first} is 'A' and 'B'" in message and "prompt_lookup" in message


def test_prompts_that_cannot_be_decoded(capsys, model, tmp_path):
    generate = ("generate", "--target", model)
    assert "a prompt is empty" in failure(capsys, *generate, "--prompt", "")
    message = failure(capsys, *generate, "--max-model-len", "16", "much too long a prompt")
    assert "prompt 0 has " in message and "16" in message
    assert "max_model_len is 129" in failure(capsys, *generate, "--max-model-len", "129", "hi")
    plain = tiny.write_directory(tmp_path / "plain", CONFIG)
    tiny.write_tokenizer(plain, template=None)
    message = failure(capsys, "generate", "--target", plain, "--chat", "hi")
    assert "chat template" in message
    assert "chat template" in failure(capsys, "chat", "--target", plain)


def test_debug_shows_the_traceback(capsys):
    code = main(["generate", "--target", "t", "--top-p", "2", "--debug", "hi"])
    err = capsys.readouterr().err
    assert code == 2
    assert "Traceback" in err and err.endswith("error: top_p is 2.0; give a number in (0, 1].\n")


# Prompts.


def prompts_of(llm: type[Scripted]) -> list:
    return [list(each) for each in llm.prompts][-1]


def finished(count: int):
    return [(i, f"<{i}>", output(f"<{i}>")) for i in range(count)]


def test_prompts_come_from_everywhere_in_order(capsys, scripted, monkeypatch, tmp_path):
    (tmp_path / "letter.txt").write_bytes("Grüße,\nline two\r\n".encode("utf-8-sig"))
    lines = ['{"prompt": "one\u2028line", "id": 1}', "", '{"prompt": "two"}']
    (tmp_path / "many.jsonl").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", Stdin("from a pipe\n"))
    llm = scripted(*finished(6))
    files = [tmp_path / "letter.txt", tmp_path / "many.jsonl", "-"]
    flags = ["--prompt", "flag"] + [each for file in files for each in ("--prompt-file", file)]
    assert run(capsys, "generate", *flags, "--target", "t", "positional")[0] == 0
    expected = ["positional", "flag", "Grüße,\nline two", "one\u2028line", "two", "from a pipe"]
    assert prompts_of(llm) == expected


def test_standard_input_is_the_prompt_if_there_is_no_other(capsys, scripted, monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin("  two\nlines\n\n"))
    llm = scripted(*finished(1))
    assert run(capsys, "generate", "--target", "t")[0] == 0
    assert prompts_of(llm) == ["  two\nlines\n"]
    monkeypatch.setattr("sys.stdin", Stdin("", terminal=True))
    assert "no prompt given" in failure(capsys, "generate", "--target", "t")
    monkeypatch.setattr("sys.stdin", Stdin(""))
    assert "standard input is empty" in failure(capsys, "generate", "--target", "t")


@pytest.mark.parametrize(
    "content, expected",
    [
        (b'{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        (b'["a"]', "line 1 is ['a']"),
        (b'{"promt": "a"}', 'no key "prompt". Found: promt.'),
        (b'{"prompt": 5}', "the prompt 5"),
        (b'{"prompt": ""}', "line 1 is empty"),
        (b'{"prompt": "\\ud800"}', "not valid text: '\\ud800'"),
        (b"\n", "holds no prompts"),
        (b"ab\xffc", "not UTF-8 text (byte 2 is 0xff)"),
    ],
)
def test_bad_prompt_files(capsys, tmp_path, content, expected):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    message = failure(capsys, "generate", "--target", "t", "--prompt-file", path)
    assert expected in message and str(path) in message


# Results.


def test_one_prompt_prints_its_text_and_statistics_apart(capsys, scripted):
    scripted((0, "[bold]lit"), (0, f"eral[/]{ESCAPE}", output("", "length")))
    code, out, err = run(capsys, "generate", "--target", "t", "--method", "prompt_lookup", "hi")
    assert (code, out) == (0, f"[bold]literal[/]{ESCAPE}\n")  # a pipe gets what the model said
    assert ESCAPE not in err
    assert re.search(r"finish reason +length", err)
    assert re.search(r"drafted tokens accepted +3 of 8 \(38%\)", err)
    assert re.search(r"accepted per position +100% 50% 0% 0%", err)
    assert re.search(r"tokens per target call +2\.50", err)
    assert re.search(r"compile +1\.50 s", err)


def test_several_prompts_are_printed_in_order_under_headings(capsys, scripted):
    steps = [(1, "B"), (0, "a"), (1, "b", output("Bb")), (0, "A", output("aA", "length"))]
    scripted(*steps, (2, "c\n", output("c\n")))
    flags = ["--prompt", "first", "--prompt", "second  \n line", "--prompt", "x" * 100]
    code, out, err = run(capsys, "generate", "--target", "t", *flags)
    assert code == 0
    assert out.splitlines() == [
        "==> prompt 0: first <==",
        "aA",
        "==> prompt 1: second line <==",
        "Bb",
        f"==> prompt 2: {'x' * 59}… <==",
        "c",
    ]
    assert re.search(r"finish reason +2 stop, 1 length", err) or "1 length, 2 stop" in err
    assert re.search(r"tokens per second +24\.0", err)  # 6 tokens in one batch of 0.25 s


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_failed_request_does_not_hide_the_others(capsys, scripted, flags):
    failed = output("a", "error", error="prompt 0: its logits hold a NaN.")
    scripted((0, "a", failed), (1, "fine", output("fine")))
    argv = ("generate", "--target", "t", "--prompt", "p", "--prompt", "q", *flags)
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert "fine" in out and err.endswith("spec-jax: error: prompt 0: its logits hold a NaN.\n")
    if flags:
        first, second = map(json.loads, out.splitlines())
        assert first["error"] == failed.error and "error" not in second


def test_ctrl_c_ends_quietly_and_keeps_what_was_printed(capsys, scripted):
    scripted((0, "so far"), KeyboardInterrupt())
    assert run(capsys, "generate", "--target", "t", "hi") == (130, "so far", "")


def test_without_a_seed_runs_differ(capsys, scripted):
    llm = scripted(*finished(1))
    for _ in range(2):
        run(capsys, "generate", "--target", "t", "hi")
    (_, first), (_, second) = llm.loaded
    assert first["seed"] != second["seed"]


@pytest.mark.parametrize("stdout", ["closed pipe", "/dev/full"])
def test_output_that_cannot_be_written(stdout):
    if stdout == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
    elif os.path.exists(stdout):
        writer = os.open(stdout, os.O_WRONLY)
    else:
        pytest.skip("this system has no /dev/full")
    process = spawn("--help", stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    _, err = process.communicate()
    if stdout == "closed pipe":
        assert (process.returncode, err) == (141, "")
    else:
        assert process.returncode == 2
        assert err.startswith("spec-jax: error: ") and err.count("\n") == 1


# With a model.

SPECULATION = {
    "none": ["--method", "none"],
    "prompt_lookup": ["--method", "prompt_lookup", "--num-speculative-tokens", "3"],
    "draft_model": ["--num-speculative-tokens", "2"],
}


def test_every_method_gives_the_same_greedy_text(capsys, model):
    results = {}
    for method, flags in SPECULATION.items():
        draft = ["--draft", model] if method == "draft_model" else []
        argv = ["generate", "--target", model, "--max-tokens", "12", "--json", "the the the"]
        code, out, err = run(capsys, *argv, *flags, *draft)
        assert (code, err) == (0, "")
        results[method] = json.loads(out)
        assert set(results[method]) == KEYS
    assert results["none"]["token_ids"] == results["prompt_lookup"]["token_ids"]
    assert results["none"]["token_ids"] == results["draft_model"]["token_ids"]
    assert results["draft_model"]["metrics"]["rounds"] == 4


def test_compare_shows_both_runs(capsys, model):
    argv = ["generate", "--target", model, "--draft", model, "--max-tokens", "8", "--compare"]
    code, out, err = run(capsys, *argv, "hi")
    assert code == 0 and out
    assert re.search(r"draft_model +plain", err)
    assert re.search(r"target calls +2 +8", err)
    assert re.search(r"target calls saved +6 of 8 \(75%\)", err)
    assert re.search(r"speed-up +\d+\.\d\dx", err)
    assert re.search(r"same text as plain +yes", err)
    code, out, err = run(capsys, *argv, "--json", "--prompt", "hi", "--prompt", "ho")
    assert (code, err) == (0, "")
    for line in out.splitlines():
        result = json.loads(line)
        assert set(result) == KEYS | {"plain", "identical"} and result["identical"] is True
        assert set(result["plain"]) == set(result["metrics"])
        assert (result["metrics"]["rounds"], result["plain"]["rounds"]) == (2, 8)
        assert result["metrics"]["compile_seconds"] == 0


def test_compare_without_speculation_or_certainty(capsys, model):
    argv = ["generate", "--target", model, "--max-tokens", "2", "--compare", "hi"]
    code, _, err = run(capsys, *argv)
    assert code == 0 and "nothing to compare" in err
    sampled = ["--method", "prompt_lookup", "--temperature", "1", "--seed", "1", "--json"]
    code, out, _ = run(capsys, *argv, *sampled)
    assert code == 0 and json.loads(out)["identical"] is None


def test_a_seed_makes_sampling_reproducible(capsys, model):
    argv = ["generate", "--target", model, "--max-tokens", "8", "--temperature", "1", "--json"]
    texts = [run(capsys, *argv, "--seed", seed, "hi")[1] for seed in (1, 1, 2)]
    first, same, other = (json.loads(text)["token_ids"] for text in texts)
    assert first == same != other


def test_json_is_utf8_and_alone_on_standard_output_in_any_locale(model, tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "gr\u00fc\u00dfe"}\n{"prompt": "second"}\n', "utf-8"
    )
    argv = ["generate", "--target", model, "--max-tokens", 6, "--json", "--ignore-eos", "--chat"]
    process = spawn(
        *argv,
        *("--prompt-file", tmp_path / "p.jsonl", "--max-num-seqs", 1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    )
    out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    results = [json.loads(line) for line in out.decode("utf-8").splitlines()]
    assert [set(result) for result in results] == [KEYS, KEYS]
    assert results[0]["usage"]["prompt_tokens"] > results[1]["usage"]["prompt_tokens"]
    assert "\\u" not in out.decode("utf-8")


# On a terminal.


class Terminal:
    """A pseudo-terminal and what was written to it."""

    def __init__(self):
        self.master, self.slave = pty.openpty()
        os.set_blocking(self.master, False)
        self.before = termios.tcgetattr(self.slave)
        self.text = ""

    def read(self) -> str:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.master, 4096):
                self.text += data.decode()
        return self.text

    def is_as_before(self) -> bool:
        """Whether modes are unchanged, and the cursor is shown after it was last hidden."""
        cursor = re.findall(r"\x1b\[\?25([lh])", self.read())
        return termios.tcgetattr(self.slave) == self.before and cursor[-1:] != ["l"]


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    yield terminal
    os.close(terminal.slave)
    os.close(terminal.master)


@pytest.fixture
def on_terminal(terminal, monkeypatch):
    """This process writes to the terminal."""
    with open(terminal.slave, "w", closefd=False) as stream:
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("sys.stderr", stream)
        yield terminal


def test_text_streams_and_cannot_command_the_terminal(scripted, on_terminal):
    seen = []
    look = lambda: seen.append(on_terminal.read())  # noqa: E731
    end = (0, f"{ESCAPE}[2J\r\x9b\a\n", output("end"))
    scripted((0, "first "), look, (0, "second"), look, end)
    assert main(["generate", "--target", "t", "hi"]) == 0
    assert seen[0].endswith("first ") and seen[1].endswith("first second")
    text = on_terminal.read()
    assert "second\u241b[2J\u240d\\x9b\u2407\r\n" in text
    assert re.search(r"tokens .*3", text)
    assert on_terminal.is_as_before()


def test_progress_goes_away_before_the_text(scripted, on_terminal, monkeypatch):
    llm = scripted((0, "text", output("text")))
    started = llm.__init__

    def loading(self, target, *, on_progress, **arguments):
        on_progress("loading [red]t[/red]")
        started(self, target, **arguments)

    monkeypatch.setattr(llm, "__init__", loading)
    assert main(["generate", "--target", "t", "hi"]) == 0
    text = on_terminal.read()
    assert "loading [red]t[/red]" in text
    assert text.index("\x1b[?25h") < text.index("text")
    assert on_terminal.is_as_before()


def test_ctrl_c_leaves_the_terminal_as_it_was(scripted, on_terminal):
    scripted((0, "so far"), KeyboardInterrupt())
    assert main(["generate", "--target", "t", "hi"]) == 130
    assert on_terminal.read().endswith("so far\r\n")
    assert on_terminal.is_as_before()


def test_a_process_on_a_terminal(model, terminal):
    """A whole run in a process of its own; the second one is interrupted while it loads."""
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave)
    argv = ["generate", "--target", model, "--max-tokens", 4, "--method", "prompt_lookup", "hi"]
    process = spawn(*argv, **streams)
    while process.poll() is None:
        terminal.read()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    assert process.returncode == 0, terminal.read()
    assert "loading" in terminal.read() and "finish reason" in terminal.text
    assert terminal.is_as_before()

    terminal.text = ""
    process = spawn(*argv, **streams)
    while "loading" not in terminal.read():
        assert process.poll() is None, terminal.text
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "Traceback" not in terminal.read()
    assert terminal.is_as_before()


def test_control_characters_become_visible():
    assert visible("a\tb\nc") == "a\tb\nc"
    assert visible("\x00\x1b\x7f\x9b") == "\u2400\u241b\u2421\\x9b"


# Chat.


def chat(capsys, monkeypatch, lines: str | bytes, *flags) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", Stdin(lines))
    return run(capsys, "chat", "--target", "t", *flags)


def test_chat_keeps_the_history_until_reset(capsys, scripted, monkeypatch):
    llm = scripted((0, "an"), (0, "swer", output("answer")))
    lines = "Hello\n\nAgain?\n/reset\nNew\n/rest\n/usr/bin is a path\n/exit\nnever\n"
    code, out, err = chat(capsys, monkeypatch, lines)
    assert (code, out) == (0, "answer\n" * 4)
    assert "unknown command '/rest'. Did you mean '/reset'?" in err
    assert "6 tokens, 2.50 per target call, 24.0 per second" in err
    lengths = [prompts[0] for prompts in llm.prompts]  # the fake tokenizer's ids are lengths
    assert lengths == [[5], [5, 6, 6], [3], [3, 6, 18]]


def test_chat_says_when_the_context_is_full(capsys, scripted, monkeypatch):
    llm = scripted((0, "answer", output("answer", "length", prompt_tokens=1)))
    code, out, err = chat(capsys, monkeypatch, "Hello\nAgain?\n", "--max-model-len", "3")
    assert code == 2  # a script should notice that a turn was refused
    assert out == "answer\n" and len(llm.prompts) == 1
    assert "the context of 3 tokens is full: /reset starts anew" in err
    assert "3 tokens, which leaves no room" in err and "/reset" in err.splitlines()[-1]


def test_chat_says_when_max_tokens_cut_the_answer(capsys, scripted, monkeypatch):
    scripted((0, "answer", output("answer", "length")))
    _, _, err = chat(capsys, monkeypatch, "Hello", "--max-tokens", "6")
    assert "cut at --max-tokens 6" in err


def test_chat_forgets_a_failed_turn(capsys, scripted, monkeypatch):
    llm = scripted((0, "x", output("x", "error", error="prompt 0: NaN")))
    code, _, err = chat(capsys, monkeypatch, "Hello\nAgain?\n")
    assert code == 2 and err.count("spec-jax: error: prompt 0: NaN") == 2
    assert [prompts[0] for prompts in llm.prompts] == [[5], [6]]


def test_chat_refuses_what_is_not_text(capsys, scripted, monkeypatch):
    scripted()
    code, _, err = chat(capsys, monkeypatch, b"\xff\n")
    assert code == 2 and "not UTF-8" in err


def test_ctrl_c_interrupts_the_answer_only(scripted, on_terminal, monkeypatch):
    llm = scripted((0, "partial"), KeyboardInterrupt())
    lines = iter(["Hello", KeyboardInterrupt(), "Go on"])

    def ask(prompt):
        on_terminal.read()
        line = next(lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin", Stdin("", terminal=True))
    assert main(["chat", "--target", "t"]) == 0
    assert [prompts[0] for prompts in llm.prompts] == [[5], [5, 7, 5]]
    text = on_terminal.read()
    assert text.count("(interrupted)") == 2 and "/exit or Ctrl-D ends" in text
    assert on_terminal.is_as_before()


def test_ctrl_c_ends_a_piped_chat(capsys, scripted, monkeypatch):
    scripted((0, "partial"), KeyboardInterrupt())
    assert chat(capsys, monkeypatch, "Hello\n") == (130, "partial", "")


def test_chat_with_a_model(capsys, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin("hi\nho\n"))
    argv = ["chat", "--target", model, "--draft", model, "--max-tokens", "4", "--ignore-eos"]
    code, out, err = run(capsys, *argv)
    assert code == 0 and out
    assert err.count("4 tokens, ") == 2


# Environment.


def test_env_reports_versions_and_devices_and_no_secret(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    code, out, err = run(capsys, "env", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["spec-jax"] == __version__
    assert {"jax", "jaxlib", "flax", "transformers"} <= set(report["packages"])
    assert report["jax"]["backend"] == "cpu" and report["jax"]["devices"]
    assert report["environment"]["XLA_FLAGS"] == "--xla_dump_to=/nowhere"
    assert "secret" not in out
    code, text, _ = run(capsys, "env")
    assert code == 0 and "secret" not in text
    assert f"spec-jax: {__version__}" in text and "  backend: cpu" in text


def test_env_reports_that_jax_does_not_start(capsys, monkeypatch):
    def broken():
        raise RuntimeError("no such platform")

    monkeypatch.setattr("jax.default_backend", broken)
    code, out, _ = run(capsys, "env")
    assert code == 0 and "RuntimeError: no such platform" in out
