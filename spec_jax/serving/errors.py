"""Errors in the shape of the OpenAI API."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from spec_jax.errors import (
    ConfigError,
    ContextLengthError,
    QueueFullError,
    RequestError,
    ShutdownError,
    SpecJaxError,
    printable,
)

RETRY_SECONDS = 1
"""What a full queue asks clients to wait; requests of seconds make room as often."""

INVALID = "invalid_request_error"


@dataclasses.dataclass(eq=False)
class ApiError(Exception):
    """An answer that reports an error.

    Attributes:
      status: of HTTP.
      message: names the value and the remedy.
      type: the error's kind, as OpenAI names them.
      param: the field of the body that is wrong, if one is.
      code: a name that programs compare.
      headers: of the answer.
    """

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The body of the answer."""
        message = printable(self.message)
        return {
            "error": {"message": message, "type": self.type, "param": self.param, "code": self.code}
        }

    def __str__(self) -> str:
        return self.message


def wrong(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A field of the body that is wrong."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: Exception, fields: Iterable[str] = ()) -> ApiError:
    """The answer for an error of the library.

    Args:
      error: what was raised.
      fields: of the body; the one that the message begins with is the error's `param`.
    """
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(RETRY_SECONDS)}
        return ApiError(429, message, "rate_limit_error", code="queue_full", headers=headers)
    if isinstance(error, ShutdownError):
        return unavailable("the server is shutting down; ask another one.")
    if isinstance(error, ContextLengthError):
        return wrong(
            "messages" if "messages" in fields else "prompt", message, "context_length_exceeded"
        )
    if isinstance(error, RequestError | ConfigError):
        first = re.match(r"\w+", message)
        param = first[0] if first and first[0] in fields else None
        return wrong(param, message)
    return ApiError(500, "the server failed; its log says why.", "server_error")


def is_expected(error: BaseException) -> bool:
    """Whether an answer tells the client what was wrong; other errors belong in the log."""
    return isinstance(error, ApiError | SpecJaxError)


def unavailable(message: str) -> ApiError:
    """The answer while the server cannot decode."""
    headers = {"Retry-After": str(RETRY_SECONDS)}
    return ApiError(503, message, "unavailable_error", headers=headers)
