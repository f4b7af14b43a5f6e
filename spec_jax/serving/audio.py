"""`/v1/audio/transcriptions` and `translations`: speech becomes text."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from spec_jax.config import SamplingParams
from spec_jax.errors import RequestError
from spec_jax.outputs import Transcription
from spec_jax.serving.errors import ApiError, wrong
from spec_jax.serving.service import Service

MAX_AUDIO = 2**26
"""Bytes of the largest audio file."""
_FIELDS = ("file", "model", "language", "response_format", "temperature", "stream", "task")
_FIELDS += ("timestamp_granularities", "timestamp_granularities[]", "user")


async def transcribe(service: Service, request: Request, task: str) -> Response:
    """Answers a request of multipart fields, one of which is the file.

    Raises:
      ApiError: a field is missing or wrong.
    """
    size = int(request.headers.get("content-length") or 0)
    if size > MAX_AUDIO:
        raise ApiError(413, f"the body has {size} bytes, and at most {MAX_AUDIO} are read.")
    async with request.form(max_files=1, max_fields=20) as form:
        fields = {name: value for name, value in form.items() if isinstance(value, str)}
        upload = form.get("file")
        for name in form:
            if name not in _FIELDS:
                raise wrong(name, f"{name} is not a field of this request; leave it out.")
        if not isinstance(upload, UploadFile):
            raise wrong("file", "file is missing; send the audio file as multipart/form-data.")
        name = fields.get("model")
        if name and name not in service.names:
            message = f"model {name!r} is not served here; {service.name!r} is."
            raise ApiError(404, message, param="model", code="model_not_found")
        form_name = fields.get("response_format", "json")
        if form_name not in FORMATS:
            raise wrong(
                "response_format",
                f"response_format is {form_name!r}; give one of {', '.join(FORMATS)}.",
            )
        if fields.get("stream", "false").lower() == "true":
            raise wrong("stream", "stream is true; a transcription comes when it is complete.")
        sampling = _sampling(fields.get("temperature"))
        suffix = Path(upload.filename or "").suffix[:8]
        descriptor, path = tempfile.mkstemp(suffix=suffix)
        try:
            with os.fdopen(descriptor, "wb") as file:
                while part := await upload.read(2**20):
                    file.write(part)
            try:
                text = await asyncio.to_thread(
                    _transcribe, service, path, fields.get("language"), task, form_name, sampling
                )
            except RequestError as error:
                raise wrong("file", str(error).replace(path, upload.filename or "file")) from None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
    return FORMATS[form_name](text, task)


def _transcribe(
    service: Service,
    path: str,
    language: str | None,
    task: str,
    form: str,
    sampling: SamplingParams | None,
) -> Transcription:
    (text,) = service.engine.llm.transcribe(
        path,
        language=language,
        task=task,
        timestamps=form not in ("json", "text"),
        sampling_params=sampling,
    )
    return text


def _sampling(text: str | None) -> SamplingParams | None:
    if text is None:
        return None
    try:
        temperature = float(text)
    except ValueError:
        raise wrong("temperature", f"temperature is {text[:50]!r}; give a number.") from None
    return SamplingParams(temperature=temperature, max_tokens=None) if temperature else None


def _json(text: Transcription, task: str) -> Response:
    usage = {"type": "duration", "seconds": round(text.seconds)}
    return JSONResponse({"text": text.text.strip(), "usage": usage})


def _plain(text: Transcription, task: str) -> Response:
    return PlainTextResponse(text.text.strip() + "\n")


def _verbose(text: Transcription, task: str) -> Response:
    segments = [
        {
            "id": i,
            "start": each.start,
            "end": each.end,
            "text": each.text,
            "tokens": list(each.token_ids),
        }
        for i, each in enumerate(text.segments)
    ]
    answer: dict[str, Any] = {"task": task, "language": text.language, "duration": text.seconds}
    return JSONResponse(answer | {"text": text.text.strip(), "segments": segments})


def _subtitles(text: Transcription, task: str) -> Response:
    lines = (
        f"{i}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{each.text.strip()}\n"
        for i, each in enumerate(text.segments, 1)
    )
    return PlainTextResponse("\n".join(lines))


def _web_subtitles(text: Transcription, task: str) -> Response:
    lines = (
        f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n{each.text.strip()}\n"
        for each in text.segments
    )
    return PlainTextResponse("WEBVTT\n\n" + "\n".join(lines), media_type="text/vtt")


def _time(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds, as subtitles have them."""
    whole_ms = round(seconds * 1000)
    minutes, ms = divmod(whole_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds_of_minute, ms = divmod(ms, 1000)
    return f"{hours:02d}:{minutes:02d}:{seconds_of_minute:02d}{point}{ms:03d}"


FORMATS: Mapping[str, Callable[[Transcription, str], Response]] = {
    "json": _json,
    "text": _plain,
    "srt": _subtitles,
    "vtt": _web_subtitles,
    "verbose_json": _verbose,
}
"""Forms of answers by their names in the OpenAI API."""
