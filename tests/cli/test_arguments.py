"""Flags become config objects, and mistakes in them end at once."""

import dataclasses
import inspect
import re
import shlex
import subprocess
import sys

import pytest

from spec_jax import LLM, SamplingParams, SpeculativeConfig, __version__
from spec_jax.cli import main
from spec_jax.cli.commands import parse
from spec_jax.cli.decoding_options import GenerateOptions
from spec_jax.cli.overview import COMMANDS
from spec_jax.config import DRAFT_LENGTH_POLICIES, PromptLookupConfig
from tests.cli.harness import failure, run

ALL_FLAGS = shlex.split("""
    --target t --draft d --method draft_model --num-speculative-tokens 7
    --draft-length-policy confidence
    --confidence-threshold 0.25 --retune-confidence --verification token --scoring block
    --num-drafts 3 --draft-vocab-size 64 --draft-quantization int4 --max-tokens 9
    --min-tokens 4 --temperature 0.0
    --top-k 3 --bad-words "x y" --bad-words z
    --top-p 0.5 --min-p 0.25 --repetition-penalty 1.5 --presence-penalty -0.5
    --frequency-penalty 0.125 --stop a --stop b --ignore-eos --seed 11 --dtype bfloat16
    --quantization int8
    --namespace mine --max-model-len 99 --max-num-seqs 2 --json --compare --debug --chat --prompt p
    --prompt-file f --logprobs 2 --stop-token-ids 5,6 --choice yes --choice no positional
""")


def test_flags_become_config_objects():
    options = parse("generate", ALL_FLAGS)
    assert options.speculative == SpeculativeConfig(
        method="draft_model",
        draft="d",
        num_speculative_tokens=7,
        draft_length_policy="confidence",
        confidence_threshold=0.25,
        retune_confidence=True,
        verification="token",
        num_drafts=3,
        draft_vocab_size=64,
        draft_quantization="int4",
    )
    assert options.sampling == SamplingParams(
        max_tokens=9,
        min_tokens=4,
        bad_words=("x y", "z"),
        temperature=0.0,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.125,
        structured_outputs={"choice": ["yes", "no"]},
        logprobs=2,
        stop=("a", "b"),
        stop_token_ids=(5, 6),
        ignore_eos=True,
        seed=11,
        namespace="mine",
    )
    assert options.llm == {
        "dtype": "bfloat16",
        "quantization": "int8",
        "max_model_len": 99,
        "max_num_seqs": 2,
    }
    assert options.sources == (("text", "positional"), ("text", "p"), ("file", "f"))
    assert (options.target, options.chat, options.json, options.compare) == ("t", True, True, True)


def test_what_is_not_given_is_left_to_the_config_objects():
    options = parse("generate", ["--target", "t"])
    assert (options.speculative, options.sampling) == (SpeculativeConfig(), SamplingParams())
    assert options == GenerateOptions(target="t") and options.llm == {}


@pytest.mark.parametrize(
    ("flag", "form"), [("json-schema", "json"), ("regex", "regex"), ("grammar", "grammar")]
)
def test_forms_of_outputs(flag, form):
    given = ["--target", "t", f"--{flag}", "{}"]
    sampling = parse("chat", given).sampling
    assert sampling == SamplingParams(structured_outputs={form: "{}"})


def test_a_draft_alone_chooses_the_method():
    given = ["--target", "t", "--draft", "d"]
    assert parse("generate", given).speculative.method == "draft_model"


@pytest.mark.parametrize("flags, chat", [("--chat --raw", False), ("--raw --chat", True)])
def test_the_last_of_chat_and_raw_wins(flags, chat):
    assert parse("generate", ["--target", "t", *flags.split()]).chat is chat


def test_help_names_every_flag_and_the_true_defaults(capsys):
    code, out, _ = run(capsys, "generate", "--help")
    assert code == 0
    assert {flag for flag in ALL_FLAGS if flag.startswith("--")} <= set(
        re.findall(r"--[\w-]+", out)
    )
    text = " ".join(out.split())
    defaults = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
    defaults |= {f.name: f.default for f in dataclasses.fields(PromptLookupConfig)}
    llm = inspect.signature(LLM.__init__).parameters
    llm_defaults = {name: llm[name].default for name in ("dtype", "quantization", "max_num_seqs")}
    defaults |= llm_defaults
    for name in ("max_tokens", "top_p", "num_drafts", "scoring", *llm_defaults):
        flag, value = f"--{name.replace('_', '-')}", re.escape(str(defaults[name]))
        assert re.search(rf"{flag} .{{0,200}}\(default: {value}\)", text), name
    configs = [
        SpeculativeConfig(method="early_exit", draft_length_policy=each)
        for each in DRAFT_LENGTH_POLICIES
    ]
    most = [config.lookahead for config in configs]
    assert set(most) == {4, 8, 20}
    assert "(default: 8 if adaptive, 4 if constant, else 20)" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_narrow_terminal(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "60")
    for argv in ([command, "--help"], ["--help"]):
        code, out, _ = run(capsys, *argv)
        assert code == 0 and max(map(len, out.splitlines())) <= 60


def test_help_comes_at_once():
    code = (
        "import sys; from spec_jax.__main__ import main; code = main();"
        "slow = {'jax', 'numpy', 'pydantic', 'rich', 'transformers'} & set(sys.modules);"
        "sys.exit(f'imports {slow}' if slow else code)"
    )
    for flag, said in (("--help", "spec-jax generate"), ("--version", __version__)):
        result = subprocess.run([sys.executable, "-c", code, flag], capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "") and said in result.stdout


def test_overview_and_version(capsys):
    assert run(capsys, "--version") == (0, f"spec-jax {__version__}\n", "")
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "") and "spec-jax generate" in out
    assert run(capsys) == (2, "", out)


MISTAKES = [
    ("--temperature -1", ["temperature is -1.0"]),
    ("--temperature nan", ["temperature is nan"]),
    ("--temperature warm", ["--temperature", "'warm' is not a number"]),
    ("--top-p 0", ["top_p is 0.0", "above 0"]),
    ("--top-p 1.5", ["top_p is 1.5", "at most 1"]),
    ("--min-p 2", ["min_p is 2.0"]),
    ("--top-k 1.5", ["--top-k", "'1.5' is not an integer"]),
    ("--num-speculative-tokens 0", ["num_speculative_tokens is 0", "at least 1"]),
    ("--max-tokens 0", ["max_tokens is 0"]),
    ("--logprobs 2", ["logprobs is 2", "--json"]),
    ("--logprobs 21 --json", ["logprobs is 21", "at most 20"]),
    ("--stop-token-ids 2,x", ["--stop-token-ids", "'x' is not an integer"]),
    ("--json-schema [", ["json is '['", "a JSON object"]),
    ("--regex a --choice b", ["structured_outputs has regex and choice", "exactly one"]),
    ("--max-model-len 0", ["max_model_len is 0"]),
    ("--max-num-seqs 0", ["max_num_seqs is 0"]),
    ("--seed -1", ["seed is -1"]),
    ("--repetition-penalty 0", ["repetition_penalty is 0.0"]),
    ("--method lookup", ["method is 'lookup'", "prompt_lookup"]),
    ("--method draft_model", ["--draft"]),
    ("--method prompt_lookup --draft d", ["draft is 'd'", "draft_model"]),
    ("--verification couple", ["verification is 'couple'", "Did you mean 'coupled'?"]),
    ("--scoring stair", ["scoring is 'stair'", "Did you mean 'stairs'?"]),
    (
        "--method early_exit --draft-length-policy confidence --confidence-threshold 2",
        ["confidence_threshold is 2.0", "at most 1"],
    ),
    ("--method early_exit --early-exit-layers 0", ["early_exit_layers is 0", "at least 1"]),
    ("--method early_exit --scoring stairs", ["'stairs'", "'early_exit'", "scoring 'block'"]),
    ("--method universal_vocabulary", ["'universal_vocabulary'", "--draft"]),
    ("--num-speculative-tokens 4", ["num_speculative_tokens is 4", "'none'", "prompt_lookup"]),
    (
        "--method prompt_lookup --draft-length-policy confidence",
        ["draft_length_policy is 'confidence'", "'prompt_lookup'", "'early_exit'", "'adaptive'"],
    ),
    (
        "--method early_exit --confidence-threshold 0.4",
        ["confidence_threshold is 0.4", "draft_length_policy is 'adaptive'", "'confidence'"],
    ),
    ("--method suffix --prompt-lookup-max 3", ["prompt_lookup_max is 3", "'suffix'", "leave"]),
    ("--num-drafts 2", ["num_drafts is 2", "'none'", "prompt_lookup"]),
    ("--draft-vocab-size 9", ["draft_vocab_size is 9", "'none'", "'draft_model'"]),
    ("--early-exit-layers 9", ["early_exit_layers is 9", "'none'", "'early_exit'"]),
    (
        "--draft-length-policy constnt",
        ["draft_length_policy is 'constnt'", "Did you mean 'constant'?"],
    ),
    ("--dtype float31", ["dtype is 'float31'", "Did you mean 'float32'?"]),
    ("--quantization int", ["quantization is 'int'", "Did you mean 'int"]),
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
    assert "stop.0 is ''" in failure(capsys, "chat", "--target", "t", "--stop", "")
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
    assert result.stderr == "spec-jax: error: top_p is 2.0; it should be at most 1.\n"


def test_debug_shows_the_traceback(capsys):
    code = main(["generate", "--target", "t", "--top-p", "2", "--debug", "hi"])
    err = capsys.readouterr().err
    assert code == 2
    assert "Traceback" in err and err.endswith("error: top_p is 2.0; it should be at most 1.\n")
