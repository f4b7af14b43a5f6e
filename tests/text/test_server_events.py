"""Streams of events, cut anywhere, with every separator of lines that Unicode has."""

import json

import pytest

from spec_jax.errors import RequestError
from spec_jax.serving.event_stream import encoded_event
from spec_jax.text.server_events import EventReader

TEXT = "one\ntwo\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029 three: é \U0001f600"


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_events_are_read_wherever_they_are_cut(size, is_ascii):
    data = json.dumps({"text": TEXT}, ensure_ascii=is_ascii)
    stream = f": a comment\r\nevent: some\r\ndata: {data}\n\ndata:{data}\n\ndata: [DONE]\n\n"
    reader = EventReader()
    pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert [each for piece in pieces for each in reader.events(piece)] == [{"text": TEXT}] * 2


def test_an_error_is_raised():
    with pytest.raises(RequestError, match="too long"):
        list(EventReader().events('data: {"error": {"message": "too long"}}\n\n'))


@pytest.mark.parametrize("name", [None, "some"])
def test_an_event_of_ours_is_one_line_for_every_client(name):
    event = {"type": name, "text": TEXT}
    text = encoded_event(event, named=name is not None).decode()
    *names, line, empty = text.splitlines()
    assert names == ([f"event: {name}"] if name else []) and empty == ""
    assert json.loads(line.removeprefix("data: ")) == event
    assert "é \U0001f600" in line
