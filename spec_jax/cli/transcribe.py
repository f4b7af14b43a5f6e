"""`spec-jax transcribe`: writes down the words of audio files."""

import dataclasses
import time

from spec_jax.cli.decoding_options import TranscribeOptions
from spec_jax.cli.loading import load
from spec_jax.cli.screen import Screen
from spec_jax.cli.statistics import Run, table


def run(options: TranscribeOptions, screen: Screen) -> int:
    """Transcribes audio files and prints their texts; returns the exit code."""
    llm = load(options, screen)
    screen.progress("listening")
    begin, compiled = time.perf_counter(), llm.engine.compile_seconds
    transcriptions = llm.transcribe(
        list(options.sounds),
        language=options.language,
        task=options.task,
        timestamps=options.timestamps,
        sampling_params=dataclasses.replace(options.sampling, max_tokens=llm.max_model_len),
    )
    seconds = time.perf_counter() - begin - (llm.engine.compile_seconds - compiled)
    for sound, text in zip(options.sounds, transcriptions, strict=True):
        if options.json:
            screen.record({"sound": sound, **text.as_dict()})
            continue
        if len(transcriptions) > 1:
            screen.heading(f"==> {sound} ({text.language}) <==")
        if options.timestamps:
            for each in text.segments:
                screen.write(f"[{_clock(each.start)} - {_clock(each.end)}]{each.text}\n")
        else:
            screen.write(text.text)
            screen.end_line()
    outputs = [window for text in transcriptions for window in text.windows]
    if not options.json:
        screen.note("")
        screen.note(table(Run(options.speculative.method, outputs, llm)))
        audio_seconds = sum(text.seconds for text in transcriptions)
        screen.note(
            f"{audio_seconds:.1f} s of audio in {seconds:.1f} s without compilation "
            f"(real-time factor {seconds / audio_seconds:.2f})"
        )
    return screen.errors_of(outputs)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(seconds, 60)
    return f"{int(minutes):02d}:{seconds:05.2f}"
