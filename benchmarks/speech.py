"""Whisper by every method, beside faster-whisper: tokens, acceptance, real-time factor.

    python -m benchmarks.speech --rival VENV/bin/python      # of an environment with faster-whisper

espeak-ng (on PATH) speaks the utterances below, which are resampled to 16 kHz once, so that both
read the same samples. faster-whisper computes in float32, with beam 1, temperature 0, no fallback,
in a separate process; the systems take turns within each repeat. Loading does not count, nor does
compilation.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import soundfile

from benchmarks.methods import show, spread
from spec_jax import LLM, SpeculativeConfig
from spec_jax.audio.wave import RATE, read_audio
from spec_jax.checkpoints.reference import locate

ENGLISH = [
    "The quick brown fox jumps over the lazy dog.",
    "Speculative decoding keeps the distribution of the target model.",
    "My dog is cute and my cat is black.",
    "Please call Stella and ask her to bring these things from the store.",
    "In eighteen sixty five the war was over and the soldiers went home.",
    "How many people live in the capital of France?",
    "The weather will be sunny tomorrow with a light wind from the west.",
    "She sells sea shells by the sea shore.",
    "Twenty three trains leave the station every hour.",
    "I would like a cup of tea and two slices of bread.",
    "The results of the experiment surprised everybody in the laboratory.",
    "Open the window and close the door behind you.",
    "A drafter proposes several tokens and the target scores them in one call.",
    "The museum is closed on Mondays.",
    "He wrote a long letter to his brother in Canada.",
    "The price of oil rose by seven percent last week.",
    "Children learn languages faster than adults.",
    "We walked along the river until the sun went down.",
    "The committee will meet again on the fifth of November.",
    "Never put off till tomorrow what you can do today.",
    "This is a longer utterance. It has several sentences. The speaker pauses now and then, and "
    "the model has to find the right places. After that, the speaker says goodbye.",
    "Music is the universal language of mankind.",
]
TINY, BASE = (f"checkpoints/whisper-{name}.toml" for name in ("tiny.en", "base"))
METHODS = {
    "plain": None,
    "prompt_lookup, K = 4": {"method": "prompt_lookup", "num_speculative_tokens": 4},
    "early_exit, K = 2": {"method": "early_exit", "num_speculative_tokens": 2},
}
WITH_TINY = {
    "tiny.en by universal_vocabulary, K = 4": {
        "method": "universal_vocabulary",
        "draft": TINY,
        "num_speculative_tokens": 4,
    }
}
RIVAL = """
import json, sys, time
from faster_whisper import WhisperModel
model = WhisperModel(sys.argv[1], device="cpu", compute_type="float32", cpu_threads=2)
def run(stamps):
    texts = []
    for file in json.loads(sys.argv[2]):
        segments, _ = model.transcribe(
            file, language="en", beam_size=1, temperature=0.0, without_timestamps=not stamps,
            condition_on_previous_text=False, compression_ratio_threshold=None,
            log_prob_threshold=None, no_speech_threshold=None)
        texts.append([token for segment in segments for token in segment.tokens])
    return texts
print(json.dumps([run(False), run(True)]), flush=True)
for line in sys.stdin:
    begin = time.perf_counter()
    run(False)
    print(time.perf_counter() - begin, flush=True)
"""


def speak(folder):
    """The utterances as files of 16 kHz."""
    files = []
    for number, text in enumerate(ENGLISH):
        raw, file = folder / "raw.wav", folder / f"{number:02d}.wav"
        subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "-w", raw, text], check=True)
        soundfile.write(file, read_audio(raw), RATE, subtype="PCM_16")
        files.append(str(file))
    return files


def for_the_rival(reference, folder):
    """The model's directory with the list of tokens that CTranslate2 reads beside it."""
    path, folder_of_model = locate(reference, print)[1], folder / Path(reference).stem
    folder_of_model.mkdir()
    for name in ("model.bin", "config.json", "tokenizer.json"):
        (folder_of_model / name).symlink_to(path / name)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids |= {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    times = [f"<|{step / 50:.2f}|>" for step in range(1501)]
    words = [*sorted(ids, key=ids.get), *(each for each in times if each not in ids)]
    (folder_of_model / "vocabulary.txt").write_text("\n".join(words) + "\n")
    return str(folder_of_model)


def tokens(results, end):
    return [
        [token for window in text.windows for token in window.token_ids if token != end]
        for text in results
    ]


def measure(reference, methods, files, folder, args):
    plain = LLM(reference, dtype="float32", quantization="none", max_num_seqs=1)
    wide = LLM(reference, dtype="float32", quantization="none", max_num_seqs=4)
    systems = {
        name: (plain, wide)
        if options is None
        else tuple(each.with_speculation(SpeculativeConfig(**options)) for each in (plain, wide))
        for name, options in methods.items()
    }
    end, seconds = plain.eos_token_ids[0], {name: [] for name in systems}
    rival = None
    if args.rival:
        directory = for_the_rival(reference, folder)
        rival = subprocess.Popen(
            [args.rival, "-c", RIVAL, directory, json.dumps(files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        theirs = json.loads(rival.stdout.readline())
        seconds["faster-whisper, float32"] = []
        for stamps, expected in enumerate(theirs):
            ours = tokens(plain.transcribe(files, language="en", timestamps=bool(stamps)), end)
            same = sum(one == other for one, other in zip(ours, expected, strict=True))
            kind = "with" if stamps else "without"
            print(f"{reference}, {kind} timestamps: {same} of {len(files)} have its tokens")
    expected = tokens(plain.transcribe(files, language="en"), end)
    same, accepted = {}, {}
    for name, (one, four) in systems.items():
        transcripts = [each.transcribe(files, language="en") for each in (one, four)]
        same[name] = all(tokens(each, end) == expected for each in transcripts)
        metrics = [window.metrics for text in transcripts[0] for window in text.windows]
        drafted = sum(each.draft_tokens for each in metrics)
        accepted[name] = (
            sum(each.accepted_tokens for each in metrics) / drafted if drafted else None,
            sum(map(len, expected)) / sum(each.rounds for each in metrics),
        )
    for _ in range(args.repeats):
        for name, (one, _) in systems.items():
            begin = time.perf_counter()
            one.transcribe(files, language="en")
            seconds[name].append(time.perf_counter() - begin)
        if rival:
            rival.stdin.write("go\n")
            rival.stdin.flush()
            seconds["faster-whisper, float32"].append(float(rival.stdout.readline()))
    if rival:
        rival.stdin.close()
        rival.wait()
    heard = sum(len(read_audio(file)) for file in files) / RATE
    print(f"\n{reference}: {len(files)} utterances, {heard:.0f} s, one at a time\n")
    show(
        "system", "real-time factor", "drafted tokens kept", "tokens per call", "plain's, B = 1, 4"
    )
    show(*["---"] * 5)
    for name, each in seconds.items():
        kept, rate = accepted.get(name, (None, None))
        show(
            name,
            spread([one / heard for one in each], 3),
            "" if kept is None else f"{kept:.2f}",
            "" if rate is None else f"{rate:.2f}",
            "" if name not in same else "the same" if same[name] else "OTHER",
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rival", help="a Python with faster-whisper")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = speak(Path(folder))
        measure(TINY, METHODS, files, Path(folder), args)
        measure(BASE, METHODS | WITH_TINY, files, Path(folder), args)


if __name__ == "__main__":
    main()
