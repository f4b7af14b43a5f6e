"""`AsyncLLM`: one running batch for asyncio."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from spec_jax import distributed
from spec_jax.config import SamplingParams, check_integer
from spec_jax.distributed.watch import end_process
from spec_jax.engine import following
from spec_jax.engine.dispatcher import Dispatcher, Mailbox
from spec_jax.engine.request_builder import Prompt
from spec_jax.errors import ConfigError, QueueFullError, ShutdownError
from spec_jax.llm import LLM
from spec_jax.outputs import StreamChunk


class RequestStream(AsyncIterator[StreamChunk]):
    """The chunks of one call, as they come; `AsyncLLM.submit` makes it.

    Close it, or use it as an asynchronous context manager, if it is not read to its end.

    Attributes:
      request_id: its name for `AsyncLLM.abort`.
    """

    def __init__(self, request_id: str, dispatcher: Dispatcher, on_close: Callable[[], object]):
        self.request_id = request_id
        self._dispatcher, self._on_close = dispatcher, on_close
        self._news, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self.mailbox = Mailbox(notify=self._notify)
        self._is_closed = False

    def _notify(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    async def __anext__(self) -> StreamChunk:
        mailbox = self.mailbox
        while not self._is_closed:
            if mailbox.chunks:
                return mailbox.chunks.popleft()
            if mailbox.error is not None or not mailbox.open:
                self.close()
                if mailbox.error is not None:
                    raise mailbox.error
                break
            await self._news.wait()
            self._news.clear()
        raise StopAsyncIteration

    def close(self) -> None:
        """Ends what has not finished; the iteration ends without its outputs."""
        if not self._is_closed:
            self._is_closed = True
            self._dispatcher.cancel(self.mailbox)
            self._on_close()
            self._news.set()

    async def __aenter__(self) -> "RequestStream":
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()


class AsyncLLM:
    """Decodes requests that come and go, for programs that use asyncio.

    A thread decodes the requests of all tasks in one running batch; the event loop never waits for
    the device. Use it as an asynchronous context manager, or call `shutdown`.

    If several processes decode together, process 0 makes it, and all others call `follow`.

    Args:
      llm: what decodes. Its other methods may be used meanwhile, by other threads.
      max_queue: most completions that may wait while `llm.max_num_seqs` are decoded; None for any
        number.

    Raises:
      ConfigError: this is not process 0, or the model reads speech in several processes.
    """

    def __init__(self, llm: LLM, max_queue: int | None = None):
        if max_queue is not None:
            check_integer("max_queue", max_queue, 0)
        self.llm, self.max_queue = llm, max_queue
        self._streams: dict[str, RequestStream] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_requests = 0
        self._lead: following.Lead | None = None
        number, count = distributed.process()
        if number > 0:
            raise ConfigError(
                f"an AsyncLLM takes requests in process 0, and this is process {number} of "
                f"{count}; call follow(llm) instead."
            )
        if count > 1:
            self._lead = following.Lead(distributed.message_channel(), llm.dispatcher.scheduler)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    @property
    def num_unfinished(self) -> int:
        """Completions that are decoded or wait."""
        return sum(len(each.mailbox.open) for each in self._streams.values())

    @property
    def num_calls(self) -> int:
        """Calls that have not ended, the ones included whose last chunks were not read yet."""
        return len(self._streams)

    @property
    def most_unfinished(self) -> int | None:
        """Completions that may be decoded and wait at a time; None for any number."""
        return None if self.max_queue is None else self.llm.max_num_seqs + self.max_queue

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_id: str | None = None,
        *,
        may_draft: bool = True,
        prediction: str = "",
    ) -> AsyncIterator[StreamChunk]:
        """Completes prompts and yields the text as it comes; like `LLM.stream`.

        Leaving the iteration, or cancelling the task, ends the requests.

        Args:
          prompts: one prompt or several.
          sampling_params: one for all prompts, or one for each; by default
            `llm.get_default_sampling_params()`.
          request_id: a name for `abort`; by default one that no other call has.
          may_draft: false decodes this call plainly, whatever drafts for others.
          prediction: a text that the output may resemble. The method `prompt_lookup` drafts from
            it, too; no model reads it.

        Raises:
          RequestError, ConfigError: `LLM.generate`'s; or `request_id` is taken.
          QueueFullError: as many completions wait as may.
          ShutdownError: `shutdown` was called.
        """
        options: Any = {"may_draft": may_draft, "prediction": prediction}
        submitted = self.submit(prompts, sampling_params, request_id, **options)
        async with await submitted as stream:
            async for chunk in stream:
                yield chunk

    async def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_id: str | None = None,
        *,
        may_draft: bool = True,
        prediction: str = "",
    ) -> RequestStream:
        """Queues a call of `generate`; same arguments and errors, which come at once."""
        self._check_open(request_id)
        # Tokenizing a long text would hold up all other tasks.
        entries = await asyncio.to_thread(
            self.llm.requests,
            prompts,
            sampling_params,
            may_draft=may_draft,
            prediction=prediction,
        )
        self._check_open(request_id)
        limit = self.most_unfinished
        if limit is not None and len(entries) > limit:
            raise ConfigError(
                f"{len(entries)} completions are asked for, and at most {limit} may be decoded and "
                "wait at a time; ask for fewer, or raise max_queue."
            )
        if limit is not None and self.num_unfinished + len(entries) > limit:
            raise QueueFullError(
                f"{self.num_unfinished} completions are decoded or wait, and at most {limit} may; "
                "ask again later."
            )
        self._num_requests += 1
        name = f"request-{self._num_requests}" if request_id is None else request_id
        dispatcher = self.llm.dispatcher
        stream = RequestStream(name, dispatcher, lambda: self._streams.pop(name, None))
        self._streams[name] = stream
        dispatcher.post(stream.mailbox, entries, streaming=True)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._decode, name="spec-jax-decoding", daemon=True
            )
            self._thread.start()
        return stream

    def _decode(self) -> None:
        dispatcher = self.llm.dispatcher
        if self._lead is None:
            dispatcher.run_steps(self._closing)
            return
        self._lead.begin()
        dispatcher.run_steps(self._closing, on_error=_end_all)

    def _check_open(self, request_id: str | None) -> None:
        if self._closing.is_set():
            raise ShutdownError("the AsyncLLM was shut down; make another one.")
        if request_id in self._streams:
            raise ConfigError(f"request_id {request_id!r} is taken; give each call another one.")

    def abort(self, request_id: str) -> None:
        """Ends a call, whose iteration then ends without outputs; other names are ignored."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.close()

    async def shutdown(self) -> None:
        """Ends all calls and the thread, and what follows in other processes."""
        was_open = not self._closing.is_set()
        for name in [*self._streams]:
            self.abort(name)
        self._closing.set()
        self.llm.dispatcher.wake()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        if self._lead is not None and was_open:
            await asyncio.to_thread(self._lead.end)


def _end_all(error: Exception) -> None:
    """Ends this process, and so the others: what they hold may not be the same any more."""
    end_process(f"process 0 of {distributed.process()[1]} ends: decoding failed: {error}")


def follow(llm: LLM) -> None:
    """Decodes the requests of process 0's `AsyncLLM`, until it is shut down.

    All processes of a run but the first one call it, with an `LLM` that has decoded the same.

    Raises:
      ConfigError: this is process 0.
    """
    number, count = distributed.process()
    if number == 0:
        raise ConfigError(f"process 0 of {count} leads; make an AsyncLLM in it.")
    following.follow(distributed.message_channel(), llm.dispatcher.scheduler, llm.request)
