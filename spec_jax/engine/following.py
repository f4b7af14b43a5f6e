"""Processes that decode what process 0 admits, so that one process can take requests for all.

Process 0 sends one message a step: what it admits and what it cancels. Everything else is decided
by all processes alike.
"""

import base64
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.distributed.messages import Messages
from spec_jax.engine.requests import Request, RequestInput
from spec_jax.engine.scheduler import Scheduler
from spec_jax.engine.sequence import Sequence as Decoded

_END = None
"""The last message."""


class Lead:
    """Tells other processes what the steps of a scheduler admit and cancel.

    Args:
      messages: to the other processes.
      scheduler: of this process.
    """

    def __init__(self, messages: Messages, scheduler: Scheduler):
        self._messages, self._scheduler = messages, scheduler

    def begin(self) -> None:
        """From now on each step is announced."""
        self._scheduler.on_settle = self._announce

    def end(self) -> None:
        """Ends the other processes' `follow`."""
        self._scheduler.on_settle = None
        self._messages.send(_END)

    def _announce(self, arrived: Sequence[Decoded], cancelled: Sequence[int]) -> None:
        added = [
            _as_json(each.request) | {"streaming": self._scheduler.streams(each.number)}
            for each in arrived
        ]
        self._messages.send({"added": added, "cancelled": [*cancelled]})


def follow(
    messages: Messages,
    scheduler: Scheduler,
    build: Callable[[RequestInput, SamplingParams, int], Request],
) -> None:
    """Takes the steps that process 0 announces, until it ends.

    Args:
      messages: of process 0.
      scheduler: of this process, which has had the same requests so far.
      build: makes a request, `RequestBuilder.request`.
    """
    while (message := messages.receive()) is not _END:
        for fields in message["added"]:
            scheduler.add(_from_json(fields, build), streaming=fields["streaming"])
        for number in message["cancelled"]:
            scheduler.cancel(number)
        scheduler.step()


def _as_json(request: Request) -> dict[str, Any]:
    sampling = dataclasses.asdict(request.sampling)
    sampling["logit_bias"] = [*sampling["logit_bias"].items()]
    source = request.source
    return {
        "prompt_token_ids": [*map(int, request.prompt_token_ids)],
        "sampling": sampling,
        "key": request.key.tolist(),
        "may_draft": request.may_draft,
        "prediction": [*request.prediction],
        "source": None if source is None else _array_as_json(source),
        "timestamps": request.timestamps,
    }


def _from_json(
    fields: Mapping[str, Any], build: Callable[[RequestInput, SamplingParams, int], Request]
) -> Request:
    sampling = dict(fields["sampling"])
    # Process 0 has cut the prompt already.
    sampling |= {"logit_bias": dict(sampling["logit_bias"]), "truncate_prompt_tokens": None}
    source = None if fields["source"] is None else _array_from_json(fields["source"])
    prompt = RequestInput(fields["prompt_token_ids"], source, (), fields["timestamps"])
    request = build(prompt, SamplingParams(**sampling), 0)
    unchanged: Any = {name: fields[name] for name in ("may_draft", "prediction")}
    return dataclasses.replace(request, key=np.array(fields["key"], np.uint32), **unchanged)


def _array_as_json(array: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": array.shape, "data": data}


def _array_from_json(fields: Mapping[str, Any]) -> np.ndarray:
    data = base64.b64decode(fields["data"])
    return np.frombuffer(data, fields["dtype"]).reshape(fields["shape"])
