"""Whisper's log-mel spectrum (arXiv 2212.04356, section 2.2)."""

import functools

import numpy as np
from jaxtyping import Float

from spec_jax.audio.wave import RATE

WINDOW, HOP = 400, 160
"""Samples of a frame, and from one frame to the next: 25 and 10 milliseconds."""
FRAMES_PER_SECOND = RATE // HOP
_AT_ONCE = 4096
"""Frames at a time: long recordings take little more memory than their spectra."""


def log_mel(samples: Float[np.ndarray, " samples"], bins: int) -> Float[np.ndarray, "frames bins"]:
    """A frame for each `HOP` samples, the last one cut off, as OpenAI's Whisper computes them.

    The power of a Hann window's spectrum through triangular filters (Slaney's mel scale), its
    logarithm to base 10, of which everything more than 8 below the largest is raised to that, and
    scaled to about [-1, 1].

    Args:
      samples: at 16 kHz.
      bins: mel filters, 80 or 128.
    """
    padded = np.pad(samples, WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][: len(samples) // HOP]
    hann = np.hanning(WINDOW + 1)[:-1]
    pieces = []
    for begin in range(0, len(frames), _AT_ONCE):
        windowed = frames[begin : begin + _AT_ONCE] * hann  # in float64, as `hann` is
        power = np.abs(np.fft.rfft(windowed, axis=1)) ** 2
        pieces.append(np.log10(np.maximum(power @ _filters(bins), 1e-10)).astype(np.float32))
    logs = np.concatenate(pieces)
    np.maximum(logs, logs.max() - 8.0, out=logs)
    return (logs + 4.0) / 4.0


@functools.cache
def _filters(bins: int) -> Float[np.ndarray, "frequencies bins"]:
    from transformers.audio_utils import mel_filter_bank

    return mel_filter_bank(
        num_frequency_bins=1 + WINDOW // 2,
        num_mel_filters=bins,
        min_frequency=0.0,
        max_frequency=RATE / 2,
        sampling_rate=RATE,
        norm="slaney",
        mel_scale="slaney",
    )
