"""Hands the chunks of a running batch to the callers that wait for them.

Whoever waits for a chunk runs the next step, unless another caller of the same batch is running
it, or a thread does nothing else (`run_steps`).
"""

import collections
import dataclasses
import threading
import weakref
from collections.abc import Callable, Generator, Iterable

from spec_jax.engine.progress import Bar, progress_bar
from spec_jax.engine.requests import Request
from spec_jax.engine.scheduler import Scheduler
from spec_jax.engine.sequence import Origin
from spec_jax.errors import GenerationError
from spec_jax.outputs import RequestOutput, StreamChunk

Entry = tuple[Request, Origin]
"""A request, and where it comes from."""


SECONDS_FOR_OTHERS = 0.001
"""How long a caller leaves the lock to others after a step, so that their next requests join it."""


class Device:
    """Whose step comes next, among the batches that share a device.

    Attributes:
      changed: notified after each step; its lock guards everything that callers share.
      queue: dispatchers in the order of their steps; the first one steps.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: collections.deque[Dispatcher] = collections.deque()
        self._last: Callable[[], Dispatcher | None] = lambda: None

    def enter(self, dispatcher: "Dispatcher") -> None:
        """Frees what an idle batch keeps when another one decodes."""
        last = self._last()
        if last is not None and last is not dispatcher:
            last.scheduler.release()
        self._last = weakref.ref(dispatcher)


@dataclasses.dataclass(eq=False)
class Mailbox:
    """What one caller waits for.

    Attributes:
      open: the ids of its requests that have not finished.
      chunks: what it has not taken yet.
      error: why it gets no more.
      notify: called when there is something new, by the thread that runs steps.
    """

    open: set[int] = dataclasses.field(default_factory=set)
    chunks: collections.deque[StreamChunk] = dataclasses.field(default_factory=collections.deque)
    error: Exception | None = None
    notify: Callable[[], None] = lambda: None


class Dispatcher:
    """All callers and threads of one running batch.

    Args:
      scheduler: of the batch.
      device: shared with the other batches of a target.
    """

    def __init__(self, scheduler: Scheduler, device: Device):
        self.scheduler, self._device = scheduler, device
        self._mailboxes: dict[int, Mailbox] = {}
        self._is_stepping, self._num_waiting = False, 0
        self._has_thread = False

    def chunks(
        self, entries: Iterable[Entry], *, streaming: bool
    ) -> Generator[StreamChunk, None, None]:
        """Decodes requests, from the first chunk that is asked for on.

        Closing or dropping the iterator cancels those that have not finished.
        """
        mailbox = Mailbox()
        self.post(mailbox, entries, streaming=streaming)
        try:
            while (chunk := self._next(mailbox)) is not None:
                yield chunk
        finally:
            self.cancel(mailbox)

    def post(self, mailbox: Mailbox, entries: Iterable[Entry], *, streaming: bool) -> None:
        """Queues requests whose chunks go to a mailbox."""
        with self._device.changed:
            for request, origin in entries:
                number = self.scheduler.add(request, origin, streaming=streaming)
                mailbox.open.add(number)
                self._mailboxes[number] = mailbox
            self._device.changed.notify_all()

    def run_steps(
        self, closing: threading.Event, on_error: Callable[[Exception], None] = lambda error: None
    ) -> None:
        """Runs steps whenever there is something to decode, until `closing` is set and notified.

        A step that fails ends the requests that wait, with its error, and no others; it calls
        `on_error`, too.
        """
        with self._device.changed:
            self._has_thread = True
            while not closing.is_set():
                if self._is_stepping or not self.scheduler.busy:
                    self._device.changed.wait()
                    continue
                try:
                    self._step()
                except Exception as error:  # the mailboxes have it
                    on_error(error)
            self._has_thread = False

    def wake(self) -> None:
        """Lets `run_steps` look at `closing`."""
        with self._device.changed:
            self._device.changed.notify_all()

    def outputs(
        self, entries: Iterable[Entry], counts: list[int], use_tqdm: Bar = False
    ) -> list[RequestOutput]:
        """The result of each prompt, in order.

        Args:
          entries: the requests of all prompts.
          counts: completions of each prompt.
          use_tqdm: see `LLM.generate`.

        Raises:
          GenerationError: decoding failed; its `outputs` are the results of the prompts that were
            complete.
        """
        completed: list[list[RequestOutput]] = [[] for _ in counts]
        try:
            with progress_bar(use_tqdm, sum(counts)) as advance:
                for chunk in self.chunks(entries, streaming=False):
                    if chunk.output is not None:
                        completed[chunk.index].append(chunk.output)
                        advance()
        except Exception as error:
            outputs = [
                RequestOutput.of_completions(parts) if len(parts) == count else None
                for parts, count in zip(completed, counts, strict=True)
            ]
            num_done = sum(output is not None for output in outputs)
            raise GenerationError(
                f"decoding failed after {num_done} of {len(outputs)} prompts, whose results are "
                f"this error's `outputs`: {error}",
                outputs,
            ) from error
        return [RequestOutput.of_completions(parts) for parts in completed]

    def _next(self, mailbox: Mailbox) -> StreamChunk | None:
        """The caller's next chunk, for which steps are run if nobody else runs one."""
        with self._device.changed:
            while not mailbox.chunks:
                if mailbox.error is not None:
                    raise mailbox.error
                if not mailbox.open:
                    return None
                if self._is_stepping:
                    self._num_waiting += 1
                    try:
                        self._device.changed.wait()
                    finally:
                        self._num_waiting -= 1
                else:
                    self._step()
                    if self._num_waiting:  # they may add requests once they have their chunks
                        self._device.changed.wait(SECONDS_FOR_OTHERS)
            return mailbox.chunks.popleft()

    def _step(self) -> None:
        """Waits for the device, runs a step without the lock, and delivers its chunks."""
        changed, queue = self._device.changed, self._device.queue
        self._is_stepping = True
        queue.append(self)
        try:
            while queue[0] is not self:
                changed.wait()
            self._device.enter(self)
            changed.release()
            try:
                chunks = self.scheduler.step()
            except BaseException as error:
                changed.acquire()
                self._fail(error)
                raise
            changed.acquire()
            receivers = [self._deliver(number, chunk) for number, chunk in chunks]
            for mailbox in {each for each in receivers if each is not None}:
                mailbox.notify()
        finally:
            queue.remove(self)
            self._is_stepping = False
            changed.notify_all()

    def _deliver(self, number: int, chunk: StreamChunk) -> Mailbox | None:
        mailbox = self._mailboxes.get(number)
        if mailbox is None:
            return None  # nobody waits for it any more
        mailbox.chunks.append(chunk)
        if chunk.output is not None:
            del self._mailboxes[number]
            mailbox.open.discard(number)
        return mailbox

    def _fail(self, error: BaseException) -> None:
        """Ends all requests: the batch's buffers are lost."""
        self.scheduler.reset()
        if not isinstance(error, Exception):
            error = RuntimeError(f"another caller of the same batch was interrupted: {error!r}")
        failed = {*self._mailboxes.values()}
        self._mailboxes.clear()
        for mailbox in failed:
            mailbox.error = error
            mailbox.open.clear()
            mailbox.notify()

    def cancel(self, mailbox: Mailbox) -> None:
        """Cancels what a caller no longer waits for.

        If nothing else runs it frees the memory, which a thread that runs steps keeps for others.
        """
        with self._device.changed:
            for number in mailbox.open:
                self.scheduler.cancel(number)
                del self._mailboxes[number]
            if mailbox.open and self._has_thread:
                self._device.changed.notify_all()
            elif mailbox.open and not self._is_stepping:
                self.scheduler.settle()
                self.scheduler.release()
            mailbox.open.clear()
