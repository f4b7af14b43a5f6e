"""Speech over HTTP: the official client gets what `LLM.transcribe` writes."""

import io

import httpx2 as httpx
import openai
import pytest
import soundfile

from spec_jax import LLM
from tests.serving.conftest import NAME, serving
from tests.speech import sound, write_speech_model

SAMPLES = sound(5.0, 2)


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    return LLM(write_speech_model(tmp_path_factory.mktemp("speech") / "target"), max_num_seqs=2)


@pytest.fixture(scope="module")
def client(speech):
    with (
        serving(speech) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def file():
    data = io.BytesIO()
    soundfile.write(data, SAMPLES, 16_000, format="WAV")
    return "a sound.wav", data.getvalue()


def test_a_transcription_is_the_text_of_transcribe(client, speech, file):
    (expected,) = speech.transcribe(SAMPLES)
    answer = client.audio.transcriptions.create(model=NAME, file=file)
    assert answer.text == expected.text.strip()
    text = client.audio.transcriptions.create(model=NAME, file=file, response_format="text")
    assert text == expected.text.strip() + "\n"


def test_segments_have_times(client, speech, file):
    (expected,) = speech.transcribe(SAMPLES, timestamps=True)
    ask = client.audio.transcriptions.create
    answer = ask(model=NAME, file=file, response_format="verbose_json")
    times = [(each.start, each.end) for each in answer.segments]
    assert times == [(each.start, each.end) for each in expected.segments]
    assert answer.duration == pytest.approx(5.0)
    srt = ask(model=NAME, file=file, response_format="srt")
    vtt = ask(model=NAME, file=file, response_format="vtt")
    assert srt.count(" --> ") == vtt.count(" --> ") == len(times)
    assert vtt.startswith("WEBVTT\n\n")
    for line in (each for each in srt.splitlines() if " --> " in each):
        for at in line.split(" --> "):
            assert len(at) == 12 and at[8] == ","


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"prompt": "a"}, "prompt"),
        ({"stream": "true"}, "stream"),
        ({"language": "none"}, None),
    ],
)
def test_a_mistake_is_the_clients(client, file, fields, param):
    address = f"{client.base_url}audio/transcriptions"
    response = httpx.post(address, data={"model": NAME, **fields}, files={"file": file})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_what_is_not_audio_is_the_clients(client):
    address = f"{client.base_url}audio/transcriptions"
    files = {"file": ("a.wav", b"RIFF nothing")}
    assert httpx.post(address, data={"model": NAME}, files=files).status_code == 400
    assert httpx.post(address, data={"model": NAME}).status_code == 400
    headers = {"content-type": "multipart/form-data; boundary=a"}
    assert httpx.post(address, content=b"--b\r\n", headers=headers).status_code == 400


def test_text_is_not_completed_by_a_speech_model(client):
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=NAME, prompt="a")
