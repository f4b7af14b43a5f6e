"""Audio files and Whisper's spectra."""

import contextlib

import numpy as np
import pytest
import soundfile
import transformers

from spec_jax.audio import features, wave
from spec_jax.audio.features import HOP, log_mel
from spec_jax.audio.wave import RATE, check_samples, read_audio
from spec_jax.errors import RequestError

SECONDS = 30
SOUNDS = {
    "noise": lambda n: np.random.default_rng(0).normal(size=n) * 0.1,
    "a tone": lambda n: np.sin(np.arange(n) * 0.3) * 0.7,
    "silence": lambda n: np.zeros(n),
    "a click": lambda n: np.eye(1, n, 4321)[0],
}


@pytest.mark.parametrize("kind", SOUNDS)
@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("length", [401, 16_000, SECONDS * RATE])
def test_spectra_are_those_of_transformers(kind, bins, length):
    samples = SOUNDS[kind](length).astype(np.float32)
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins)
    expected = extractor._np_extract_fbank_features(
        np.pad(samples, (0, SECONDS * RATE - length))[None], "cpu"
    )[0].T
    found = log_mel(np.pad(samples, (0, SECONDS * RATE - length)), bins)
    assert found.shape == (100 * SECONDS, bins) and found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_a_long_sound_is_read_in_pieces(monkeypatch):
    samples = SOUNDS["noise"](RATE).astype(np.float32)
    samples[:HOP] *= 1e4  # the loudest frame of all sets the least of each piece
    whole = log_mel(samples, 80)
    monkeypatch.setattr(features, "_AT_ONCE", 7)
    np.testing.assert_allclose(log_mel(samples, 80), whole, rtol=0, atol=1e-6)


def test_a_spectrum_is_what_its_definition_says():
    """One frame by the sums of the Fourier transform, and its filters as triangles."""
    samples = SOUNDS["noise"](4000).astype(np.float32)
    frame, middle = 7, 7 * HOP
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    piece = samples[middle - 200 : middle + 200].astype(np.float64) * window
    k, n = np.arange(201)[:, None], np.arange(400)[None]
    power = np.abs((piece * np.exp(-2j * np.pi * k * n / 400)).sum(1)) ** 2

    def hertz(mel):  # Slaney's scale: linear below 1 kHz, logarithmic above
        return mel * 200 / 3 if mel < 15 else 1000 * np.exp((mel - 15) * np.log(6.4) / 27)

    top = 15 + np.log(8) * 27 / np.log(6.4)
    edges = [hertz(each) for each in np.linspace(0, top, 82)]
    at = np.arange(201) * 40.0
    bands = []
    for low, peak, high in zip(edges, edges[1:], edges[2:], strict=False):
        slopes = np.minimum((at - low) / (peak - low), (high - at) / (high - peak))
        bands.append((power * np.maximum(slopes, 0)).sum() * 2 / (high - low))
    logs = np.log10(np.maximum(bands, 1e-10))
    whole = log_mel(samples, 80)
    loudest = whole.max() * 4 - 4
    np.testing.assert_allclose(whole[frame] * 4 - 4, np.maximum(logs, loudest - 8), atol=1e-4)


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100])
def test_files_become_mono_at_16_kilohertz(tmp_path, rate):
    seconds, file = 1.5, tmp_path / "sound.wav"
    at = np.arange(int(seconds * rate)) / rate
    left, right = np.sin(2 * np.pi * 440 * at), np.sin(2 * np.pi * 1000 * at)
    soundfile.write(file, np.stack([left, right], 1) * 0.5, rate)
    found = read_audio(file)
    assert abs(len(found) - seconds * RATE) <= 1 and found.dtype == np.float32
    at = np.arange(len(found)) / RATE
    expected = 0.25 * (np.sin(2 * np.pi * 440 * at) + np.sin(2 * np.pi * 1000 * at))
    np.testing.assert_allclose(found[200:-200], expected[200:-200], atol=2e-3)


def test_files_that_hold_no_sound(tmp_path):
    file = tmp_path / "sound.wav"
    with pytest.raises(RequestError, match="there is no such file"):
        read_audio(file)
    file.write_bytes(b"RIFF, but nothing more")
    with pytest.raises(RequestError, match="cannot be read as audio"):
        read_audio(file)
    soundfile.write(file, np.zeros(0), RATE)
    with pytest.raises(RequestError, match=f"^{file} lasts 0 s"):
        read_audio(file)
    with pytest.raises(RequestError, match="no such file"):
        read_audio(tmp_path)


def test_a_long_file_is_read_in_pieces(tmp_path, monkeypatch):
    file, samples = tmp_path / "sound.wav", SOUNDS["noise"](5000)
    soundfile.write(file, np.stack([samples, samples * 0.5], 1), RATE)
    whole = read_audio(file)
    monkeypatch.setattr(wave, "_AT_ONCE", 999)
    np.testing.assert_array_equal(read_audio(file), whole)
    assert len(whole) == 5000


@pytest.mark.parametrize("rate", [1, 3999, 384_001, 2**31 - 1])
def test_rates_that_no_sound_has(tmp_path, rate):
    """A second of one sample would become 16,000, and a filter has as many taps as the rate."""
    file = tmp_path / "sound.wav"
    soundfile.write(file, np.zeros(1000), RATE)
    content = file.read_bytes()
    said = np.array([RATE], "<u4").tobytes()
    assert content.count(said) == 1
    file.write_bytes(content.replace(said, np.array([rate], "<u4").tobytes()))
    with pytest.raises(RequestError, match=rf"^{file} has {rate} samples a second; give 4000"):
        read_audio(file)


def test_mutants_of_a_file_are_read_or_refused(tmp_path):
    random = np.random.default_rng(0)
    file, read = tmp_path / "sound.wav", 0
    soundfile.write(file, SOUNDS["noise"](2000), RATE)
    content = file.read_bytes()
    for _ in range(1000):
        mutant = bytearray(content)
        for _ in range(random.integers(1, 4)):
            mutant[random.integers(44)] = random.choice([0, 1, 255, random.integers(256)])
        file.write_bytes(mutant)
        with contextlib.suppress(RequestError):
            read += bool(len(read_audio(file)))
    assert 0 < read < 1000


@pytest.mark.parametrize("wrong", [np.zeros(5, np.int16), np.array(["a"]), np.zeros(5, complex)])
def test_samples_that_are_no_floating_point_numbers(wrong):
    with pytest.raises(RequestError, match=f"is an array of {wrong.dtype}; give floating-point"):
        check_samples(wrong, "sound 0")


@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 5)), np.zeros(0), np.array([1.0, np.nan]), np.array([1e300])]
)
def test_samples_are_one_channel_of_finite_numbers(wrong):
    with pytest.raises(RequestError, match=r"sound 0 is an array of shape .*; give the finite"):
        check_samples(wrong, "sound 0")
