"""Speech to text through `LLM` and the command line: every method says what plain decoding says."""

import json
import shutil

import numpy as np
import pytest
import soundfile
from safetensors.numpy import load_file, save_file

from spec_jax import LLM, ConfigError, RequestError, SamplingParams, SpeculativeConfig
from spec_jax.cli import main
from spec_jax.engine.transcription import SoundReader
from spec_jax.outputs import CompletionOutput, RequestOutput, SpeculativeMetrics
from spec_jax.text.speech import SpeechTokens
from spec_jax.text.tokenizer import Tokenizer
from tests.often import often
from tests.speech import LANGUAGES, MULTILINGUAL, config, sound, tokenizer, write_speech_model

SOUNDS = [sound(1.5, 0), sound(0.4, 1), sound(5.0, 2), sound(2.0, 3)]
METHODS = {
    "draft_model": {"draft": "other"},
    "a copy": {"method": "draft_model", "draft": "target"},
    "prompt_lookup": {},
    "early_exit": {},
    "suffix": {},
    "recycle": {},
    "universal_vocabulary": {"draft": "other"},
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    path = tmp_path_factory.mktemp("speech")
    return {
        "target": write_speech_model(path / "target"),
        "other": write_speech_model(path / "other", seed=1, layers=1),
        "several": write_speech_model(path / "several", vocab_size=MULTILINGUAL),
    }


@pytest.fixture(scope="module")
def llm(directories):
    return LLM(directories["target"], max_num_seqs=4)


def said(llm, sounds=SOUNDS, **options):
    return [[each.token_ids for each in text.windows] for text in llm.transcribe(sounds, **options)]


@pytest.fixture(scope="module")
def plain(llm):
    hot = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    return {
        "greedy": said(llm),
        "timestamps": said(llm, timestamps=True),
        "sampled": said(llm, sampling_params=hot, timestamps=True),
    }


def test_windows(llm, plain):
    assert [len(windows) for windows in plain["greedy"]] == [1, 1, 3, 1]
    texts = llm.transcribe(SOUNDS)
    assert [text.seconds for text in texts] == [1.5, 0.4, 5.0, 2.0]
    ends = [segment.end for segment in texts[2].segments]
    assert len(ends) <= 3 and all(end <= 5.0 for end in ends)
    assert len({windows[0] for windows in plain["greedy"]}) == len(SOUNDS)


@pytest.mark.parametrize("method", often(METHODS, ["prompt_lookup"]))
def test_every_method_says_what_plain_decoding_says(directories, llm, plain, method):
    options = {"method": method, **METHODS[method]}
    if draft := options.get("draft"):
        options["draft"] = directories[draft]
    # However slow the draft is here, it drafts.
    options |= {"num_speculative_tokens": 3, "draft_length_policy": "constant"}
    config = SpeculativeConfig(**options)
    speculative = llm.with_speculation(config)
    assert said(speculative) == plain["greedy"]
    assert [said(speculative, one)[0] for one in SOUNDS[:2]] == plain["greedy"][:2]
    assert said(speculative, timestamps=True) == plain["timestamps"]
    if method == "a copy":
        drafter = speculative.engine.drafter
        assert drafter.shares_encoder
        metrics = speculative.transcribe(SOUNDS[0])[0].windows[0].metrics
        assert metrics.draft_acceptance_rate > 0.9


def test_a_window_has_at_most_half_of_the_context(llm, plain):
    half = config().max_position // 2
    windows = [ids for kind in ("greedy", "timestamps") for each in plain[kind] for ids in each]
    assert max(map(len, windows)) == half
    few = SamplingParams(max_tokens=3)
    assert max(len(ids) for each in said(llm, sampling_params=few) for ids in each) == 3


def test_what_is_suppressed_is_not_said(plain):
    windows = [ids for kind in plain.values() for windows in kind for ids in windows]
    assert not any({257, 264} & set(ids) for ids in windows)
    for windows in plain["greedy"]:
        assert all(ids[0] not in (220, 256) for ids in windows)


def test_timestamps_obey_their_rules(plain):
    first, spoken = 267, 0
    for kind in ("timestamps", "sampled"):
        for ids in (ids for windows in plain[kind] for ids in windows):
            assert first <= ids[0] <= first + 50
            times = [token for token in ids if token >= first]
            assert times == sorted(times)
            spoken += len(times)
            for before, token, after in zip((None, *ids), ids, (*ids[1:], None), strict=False):
                if token >= first and after is not None and before is not None and before < first:
                    assert after >= first or after == 256
    assert spoken > 10


@pytest.mark.slow
def test_languages(directories):
    llm = LLM(directories["several"], max_num_seqs=4)
    found = llm.transcribe(SOUNDS[:2])
    assert all(text.language in ("en", "de", "fr") for text in found)
    german = llm.transcribe(SOUNDS[0], language="de", task="translate")
    assert german[0].language == "de"
    with pytest.raises(ConfigError, match=r"language is 'dee'\. Did you mean 'de'"):
        llm.transcribe(SOUNDS[0], language="dee")
    with pytest.raises(ConfigError, match="task is 'sing'"):
        llm.transcribe(SOUNDS[0], task="sing")


@pytest.mark.slow
def test_the_likelier_of_two_close_languages(directories, tmp_path):
    """Their logits are multiples of one, so that either the last or the first is the largest."""
    path = tmp_path / "model"
    shutil.copytree(directories["several"], path)
    tensors = load_file(path / "model.safetensors")
    rows = tensors["model.decoder.embed_tokens.weight"]
    en, de, fr = (tokenizer().token_to_id(f"<|{code}|>") for code in LANGUAGES)
    found = []
    for sign in (1, -1):
        rows[en] = sign * rows[fr]
        rows[de], rows[fr] = rows[en] * (1 + 1e-5), rows[en] * (1 + 2e-5)
        save_file(tensors, path / "model.safetensors")
        found.append(LLM(str(path)).transcribe(SOUNDS[0])[0].language)
    assert sorted(found) == ["en", "fr"]


def test_what_is_refused(directories, llm, tmp_path):
    with pytest.raises(ConfigError, match="the model transcribes English alone"):
        llm.transcribe(SOUNDS[0], language="de")
    with pytest.raises(RequestError, match="reads speech, not text; use `transcribe`"):
        llm.generate("Hello")
    with pytest.raises(RequestError, match="sound 1 is an array of shape"):
        llm.transcribe([SOUNDS[0], np.zeros((2, 2))])
    with pytest.raises(RequestError, match="sound 1 is 5; give a path"):
        llm.transcribe([SOUNDS[0], 5])
    several = SpeculativeConfig(
        method="universal_text", draft=directories["other"], num_speculative_tokens=2
    )
    with pytest.raises(ConfigError, match="has an encoder, and method 'universal_text'"):
        llm.with_speculation(several)


def test_the_command(directories, tmp_path, capsys):
    files = []
    for i, each in enumerate(SOUNDS[:2]):
        files.append(str(tmp_path / f"{i}.wav"))
        soundfile.write(files[-1], each, 16000)
    target = ["--target", directories["target"]]
    assert main(["transcribe", *files, *target, "--json", "--method", "prompt_lookup"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["sound"] for line in lines] == files and lines[0]["seconds"] == 1.5
    assert main(["transcribe", files[0], *target, "--timestamps"]) == 0
    captured = capsys.readouterr()
    assert "real-time factor" in captured.out + captured.err
    assert main(["transcribe", *target]) == 2
    assert "no sounds given" in capsys.readouterr().err


def output(*ids):
    metrics = SpeculativeMetrics(1, 0, 0, (), 0.0, 0.0, 0.0, len(ids))
    completion = CompletionOutput(0, "", tuple(ids), "stop", metrics)
    return RequestOutput("0", None, (0,), (completion,))


FIRST, END = 267, 256


@pytest.mark.parametrize(
    ("ids", "segments", "frames"),
    [
        # Two whole segments, and one that goes on in the next window.
        ((0, "a", 10, 10, "b", 30, 30, "c"), [(0, 0.2), (0.2, 0.6)], 60),
        # The last one has ended, and silence follows.
        ((0, "a", 10, 10, "b", 30), [(0, 0.2), (0.2, 0.6)], 200),
        ((0, "a", 30), [(0, 0.6)], 200),
        ((5, "a"), [(0.1, 2.0)], 200),
        ((), [], 200),
        # A pair of the window's begin must not stop the reading.
        ((0, 0), [], 1),
    ],
)
def test_where_the_next_window_begins(ids, segments, frames):
    special = tokenizer()
    tokens = Tokenizer(special, eos_token_ids=(END,))
    speech = SpeechTokens.of(tokens, "tiny", 2000, [], [])
    text = SoundReader(sound(10.0), config().encoder, speech, timestamps=True)
    said = [FIRST + each if isinstance(each, int) else special.token_to_id(each) for each in ids]
    text.take(output(*said, END), tokens)
    found = [(round(each.start, 2), round(each.end, 2)) for each in text.segments]
    assert found == segments and text.position == frames


@pytest.mark.slow
def test_the_audit(directories, capsys):
    """Of sampled tokens, too, on random audio that the audit makes."""
    command = ["audit", "--target", directories["target"], "--draft", directories["other"]]
    options = ["--num-speculative-tokens", "2", "--samples", "256", "--max-tokens", "8"]
    assert main([*command, *options]) == 0
    assert "PASS: nothing is lost." in capsys.readouterr().out
    assert main([*command, "--prompt", "Hello"]) == 2
    assert "reads speech, not text; leave the prompts out" in capsys.readouterr().err
