"""The routes of the server, and what surrounds all of them."""

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import spec_jax
from spec_jax.serving.audio import transcribe
from spec_jax.serving.chat import ChatCompletion
from spec_jax.serving.completions import TextCompletion
from spec_jax.serving.errors import ApiError, api_error, is_expected, unavailable, wrong
from spec_jax.serving.event_stream import ApiRequest, EventStream
from spec_jax.serving.fields import Fields
from spec_jax.serving.messages import Message, count_tokens, error_body
from spec_jax.serving.metrics import CONTENT_TYPE
from spec_jax.serving.responses import ResponseRequest
from spec_jax.serving.service import Service

MAX_BODY = 2**25
"""Bytes of the largest body: more text than any context holds."""
BODY_SECONDS = 60
"""How long a body may take to arrive."""
UNREAD = (401, 404, 405, 408, 413)
"""Statuses of answers that may come before the body does."""
MAX_DISCARDED, DISCARD_SECONDS = 2**26, 5
"""Bytes and time of a body that are read for nothing after such an answer was decided on. A client
that still sends when the connection is closed loses the answer (nginx calls this lingering)."""
OPEN_PATHS = ("/", "/health", "/metrics", "/version")
"""What needs no API key."""

PAGE = Path(__file__).with_name("page.html")

log = logging.getLogger("spec_jax.serving")


def make_app(
    service: Service,
    *,
    api_keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    lifespan: Callable[[Starlette], Any] | None = None,
) -> Starlette:
    """The server's application.

    Args:
      service: the model.
      api_keys: one of them must come with each request; none for no check.
      origins: the web pages, by origin, that browsers may let ask.
      lifespan: runs around the server.
    """
    endpoints = _Endpoints(service, api_keys)
    post, get = ["POST"], ["GET"]
    routes = [
        Route("/v1/completions", endpoints.decoding(TextCompletion), methods=post),
        Route("/v1/chat/completions", endpoints.decoding(ChatCompletion), methods=post),
        Route("/v1/responses", endpoints.decoding(ResponseRequest), methods=post),
        Route("/v1/messages", endpoints.decoding(Message), methods=post),
        Route("/v1/messages/count_tokens", endpoints.guarded(endpoints.count_tokens), methods=post),
        Route("/v1/audio/transcriptions", endpoints.speech("transcribe"), methods=post),
        Route("/v1/audio/translations", endpoints.speech("translate"), methods=post),
        Route("/v1/models", endpoints.guarded(endpoints.models), methods=get),
        Route("/v1/models/{name:path}", endpoints.guarded(endpoints.model), methods=get),
        Route("/tokenize", endpoints.guarded(endpoints.tokenize), methods=post),
        Route("/detokenize", endpoints.guarded(endpoints.detokenize), methods=post),
        Route("/", endpoints.guarded(endpoints.page), methods=get),
        Route("/health", endpoints.guarded(endpoints.health), methods=get),
        Route("/metrics", endpoints.guarded(endpoints.metrics), methods=get),
        Route("/version", endpoints.guarded(endpoints.version), methods=get),
    ]
    middleware = []
    if origins:
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=[*origins], allow_methods=["*"], allow_headers=["*"]
            )
        )
    return Starlette(
        routes=routes,
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error},
    )


class _Endpoints:
    """The functions behind the routes."""

    def __init__(self, service: Service, api_keys: Sequence[str]):
        self._service, self._keys = service, [each.encode() for each in api_keys]

    def guarded(
        self, act: Callable[[Request], Coroutine[Any, Any, Response]]
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """An endpoint whose errors are answers, and that checks the key."""

        async def respond(request: Request) -> Response:
            try:
                self._check_key(request)
                return await act(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except HTTPException:
                raise
            except Exception as error:
                return await _error_response(request, error)

        return respond

    def decoding(self, kind: Callable[[Service, Any], ApiRequest]) -> Callable[..., Any]:
        """An endpoint that decodes."""

        async def respond(request: Request) -> Response:
            body = await read_json(request)
            try:
                return await self._decode(request, kind(self._service, body))
            except Exception as error:
                raise api_error(error, body) if is_expected(error) else error from error

        return self.guarded(respond)

    def speech(self, task: str) -> Callable[..., Any]:
        """An endpoint that transcribes or translates."""

        async def respond(request: Request) -> Response:
            if not self._service.is_ready:
                raise unavailable("the server is loading, or is shutting down; ask again later.")
            return await transcribe(self._service, request, task)

        return self.guarded(respond)

    async def _decode(self, request: Request, query: ApiRequest) -> Response:
        stream = await query.submit()
        if query.streams:
            return EventStream(query, stream)
        try:
            result = await until_disconnected(request, query.result(stream))
        finally:
            stream.close()
        return JSONResponse(result)

    def _check_key(self, request: Request) -> None:
        if not self._keys or request.url.path in OPEN_PATHS:
            return
        header = request.headers.get("authorization", "")
        scheme, _, bearer = header.partition(" ")
        key = bearer if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        # All are compared, so that the time tells nothing.
        if not any(
            [hmac.compare_digest(key.strip().encode("latin-1"), each) for each in self._keys]
        ):
            message = "the API key is missing or wrong; send it as: Authorization: Bearer KEY."
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, "authentication_error", None, "invalid_api_key", headers)

    def _card(self, name: str) -> dict[str, Any]:
        length = self._service.max_model_len
        return {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "spec-jax",
            "root": self._service.engine.llm.name,
            "max_model_len": length,
            "context_length": length,
            "meta": {"n_ctx": length, "n_vocab": self._service.tokenizer.vocab_size},
        }

    async def models(self, request: Request) -> Response:
        cards = [self._card(each) for each in self._service.names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._service.names:
            message = f"model {name!r} is not served here; {self._service.name!r} is."
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(self._card(name))

    async def count_tokens(self, request: Request) -> Response:
        body = await read_json(request)
        try:
            return JSONResponse(await count_tokens(self._service, body))
        except Exception as error:
            raise api_error(error, body) if is_expected(error) else error from error

    async def tokenize(self, request: Request) -> Response:
        fields = Fields(await read_json(request))
        self._service.check_model(fields)
        special = fields.take("add_special_tokens", bool)
        spells = fields.take("return_token_strs", bool, False)
        messages, text = fields.take("messages", list), fields.take("prompt", str)
        generates = fields.take("add_generation_prompt", bool, True)
        tools = fields.take("tools", list)
        variables = fields.take("chat_template_kwargs", dict)
        fields.end()
        tokenizer = self._service.tokenizer
        if (messages is None) == (text is None):
            raise wrong("prompt", "give either prompt, a text, or messages.")
        try:
            if messages is not None:
                text = await asyncio.to_thread(
                    tokenizer.apply_chat_template,
                    messages,
                    tools=tools,
                    add_generation_prompt=generates,
                    chat_template_kwargs=variables,
                )
            default = messages is None
            ids = await asyncio.to_thread(
                tokenizer.encode, text, default if special is None else special
            )
        except Exception as error:
            raise api_error(error, fields.names) if is_expected(error) else error from error
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._service.max_model_len,
            "tokens": ids,
        }
        if spells:
            answer["token_strs"] = [tokenizer.token(each) for each in ids]
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        fields = Fields(await read_json(request))
        self._service.check_model(fields)
        ids = fields.needed("tokens", list)
        fields.end()
        size = self._service.tokenizer.vocab_size
        for each in ids:
            if not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < size:
                raise wrong("tokens", f"tokens holds {each!r}; give integers from 0 to {size - 1}.")
        text = await asyncio.to_thread(self._service.tokenizer.decode, ids, False)
        return JSONResponse({"prompt": text})

    async def page(self, request: Request) -> Response:
        headers = {"Content-Security-Policy": "default-src 'self' 'unsafe-inline'"}
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)

    async def health(self, request: Request) -> Response:
        if not self._service.is_ready:
            raise unavailable("the server is loading, or is shutting down.")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": spec_jax.__version__})


async def until_disconnected(request: Request, act: Coroutine[Any, Any, Any]) -> Any:
    """The result of `act`, which is cancelled if the client leaves before.

    Raises:
      ClientDisconnect: it has left.
    """

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    acting, leaving = asyncio.ensure_future(act), asyncio.ensure_future(leave())
    try:
        await asyncio.wait((acting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not acting.done():
            raise ClientDisconnect
        return acting.result()
    finally:
        for each in (acting, leaving):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def read_json(request: Request) -> dict[str, Any]:
    """The body, if it is a JSON object.

    Raises:
      ApiError: it is something else, or too large, or does not arrive.
    """
    data = await read_body(request, MAX_BODY)
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise wrong(None, f"the body is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise wrong(None, f"the body is JSON, but no object: {str(body)[:50]}.")
    return body


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of `limit` bytes at most."""
    too_large = ApiError(413, f"the body has more than {limit} bytes; send less.")
    with contextlib.suppress(ValueError):
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_SECONDS} s; send it faster."
        raise ApiError(408, message, "timeout_error") from None
    return b"".join(parts)


async def _discard_body(request: Request) -> None:
    if "expect" in request.headers:
        return  # the client sends nothing before it is told to
    size = 0
    with contextlib.suppress(TimeoutError, ClientDisconnect, RuntimeError):  # it was read before
        async with asyncio.timeout(DISCARD_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > MAX_DISCARDED:
                    return


async def _error_response(request: Request, error: Exception) -> Response:
    if not is_expected(error):
        log.error("a request failed", exc_info=error)
    answer = api_error(error)
    headers = dict(answer.headers)
    if answer.status in UNREAD:
        headers["Connection"] = "close"  # the rest of an endless body would be read for ever
        await _discard_body(request)
    of_messages = request.url.path.startswith("/v1/messages")
    body = error_body(answer) if of_messages else answer.as_dict()
    return JSONResponse(body, answer.status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    return await _error_response(
        request, ApiError(error.status_code, message, headers=error.headers or {})
    )
