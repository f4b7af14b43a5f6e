"""Audio files as mono samples at the rate that speech models expect."""

import math
import os
from pathlib import Path

import numpy as np
from jaxtyping import Float

from spec_jax.errors import RequestError, extra

RATE = 16_000
"""Samples a second."""
MAX_SECONDS = 24 * 3600
MIN_RATE, MAX_RATE = 4_000, 384_000
"""Of files; with other rates a header could ask for any amount of memory."""
_AT_ONCE = 1 << 14
"""Frames whose channels are in memory at a time."""


def read_audio(path: str | os.PathLike[str]) -> Float[np.ndarray, " samples"]:
    """The samples of an audio file in [-1, 1]: channels averaged, resampled to `RATE`.

    Args:
      path: a file that libsndfile reads, such as WAV, FLAC, OGG or MP3.

    Raises:
      RequestError: it is missing, damaged, of another kind, longer than a day, or of a rate that
        is not between `MIN_RATE` and `MAX_RATE`.
    """
    with extra("speech"):
        import soundfile
    from scipy.signal import resample_poly

    file = Path(path).expanduser()
    if not file.is_file():
        raise RequestError(f"{file} is not an audio file: there is no such file.")
    try:
        with soundfile.SoundFile(file) as audio:
            rate, frames = audio.samplerate, audio.frames
            if not MIN_RATE <= rate <= MAX_RATE:
                raise RequestError(
                    f"{file} has {rate} samples a second; give {MIN_RATE} to {MAX_RATE}."
                )
            if not 0 < frames <= MAX_SECONDS * rate:
                raise RequestError(
                    f"{file} lasts {frames / rate:.0f} s; give between one sample and a day."
                )
            blocks = audio.blocks(_AT_ONCE, dtype="float32", always_2d=True)
            samples = np.concatenate([block.mean(1) for block in blocks])
    except RequestError:
        raise
    except (soundfile.SoundFileError, OSError, ValueError) as error:
        raise RequestError(f"{file} cannot be read as audio ({error}).") from None
    if rate != RATE:
        common = math.gcd(rate, RATE)
        samples = resample_poly(samples, RATE // common, rate // common).astype(np.float32)
    return check_samples(samples, str(file))


def check_samples(samples: np.ndarray, name: str) -> Float[np.ndarray, " samples"]:
    """The samples in float32, if they are finite floating-point numbers.

    Raises:
      RequestError: they are not; `name` is their name in the message.
    """
    if not np.issubdtype(samples.dtype, np.floating):
        raise RequestError(
            f"{name} is an array of {samples.dtype}; give floating-point samples in [-1, 1], such "
            "as 16-bit integers divided by 32768."
        )
    with np.errstate(over="ignore"):  # values that float32 cannot hold are refused below
        floats = samples.astype(np.float32)
    if floats.ndim != 1 or not floats.size or not np.isfinite(floats).all():
        raise RequestError(
            f"{name} is an array of shape {floats.shape}; give the finite samples of one channel "
            f"at {RATE} Hz."
        )
    return floats
