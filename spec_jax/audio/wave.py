"""Sound files, as mono samples at the rate that models of speech expect."""

import math
import os
from pathlib import Path

import numpy as np
from jaxtyping import Float

from spec_jax.errors import RequestError, extra

RATE = 16_000
"""Samples a second."""
MOST_SECONDS = 24 * 3600
LEAST_RATE, MOST_RATE = 4_000, 384_000
"""Of files. A header that says less or more would ask for any amount of memory."""
_AT_ONCE = 1 << 14
"""Frames: the channels of no more are in memory at a time."""


def read_sound(path: str | os.PathLike[str]) -> Float[np.ndarray, " samples"]:
    """The samples of a sound file in [-1, 1]: channels averaged, resampled to `RATE`.

    Args:
      path: a file that libsndfile reads, such as WAV, FLAC, OGG or MP3.

    Raises:
      RequestError: it is missing, damaged, of another kind, longer than a day, or of a rate that
        is not between `LEAST_RATE` and `MOST_RATE`.
    """
    with extra("speech"):
        import soundfile
    from scipy.signal import resample_poly

    file = Path(path).expanduser()
    if not file.is_file():
        raise RequestError(f"{file} is no sound file: there is no such file.")
    try:
        with soundfile.SoundFile(file) as sound:
            rate, frames = sound.samplerate, sound.frames
            if not LEAST_RATE <= rate <= MOST_RATE:
                raise RequestError(
                    f"{file} has {rate} samples a second; give {LEAST_RATE} to {MOST_RATE}."
                )
            if not 0 < frames <= MOST_SECONDS * rate:
                raise RequestError(
                    f"{file} lasts {frames / rate:.0f} s; give between one sample and a day."
                )
            blocks = sound.blocks(_AT_ONCE, dtype="float32", always_2d=True)
            samples = np.concatenate([block.mean(1) for block in blocks])
    except RequestError:
        raise
    except (soundfile.SoundFileError, OSError, ValueError) as error:
        raise RequestError(f"{file} cannot be read as sound ({error}).") from None
    if rate != RATE:
        common = math.gcd(rate, RATE)
        samples = resample_poly(samples, RATE // common, rate // common).astype(np.float32)
    return check_samples(samples, str(file))


def check_samples(samples: np.ndarray, name: str) -> Float[np.ndarray, " samples"]:
    """The samples in float32, if they are some finite floating-point numbers.

    Raises:
      RequestError: they are not; `name` stands for them in the message.
    """
    if not np.issubdtype(samples.dtype, np.floating):
        raise RequestError(
            f"{name} is an array of {samples.dtype}; give floating-point samples in [-1, 1], such "
            "as those of 16-bit integers divided by 32768."
        )
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
        found = samples.astype(np.float32)
    if found.ndim != 1 or not found.size or not np.isfinite(found).all():
        raise RequestError(
            f"{name} is an array of shape {found.shape}; give the finite samples of one channel at "
            f"{RATE} Hz."
        )
    return found
