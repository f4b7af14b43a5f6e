"""One served model: what endpoints share."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from spec_jax.async_llm import AsyncLLM, RequestStream
from spec_jax.config import SamplingParams
from spec_jax.engine.request_builder import Prompt
from spec_jax.outputs import StreamChunk
from spec_jax.serving.errors import ApiError, unavailable
from spec_jax.serving.fields import Fields
from spec_jax.serving.metrics import Metrics
from spec_jax.serving.parsing import Format, reasons, tool_format
from spec_jax.text.tokenizer import Tokenizer

_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What a model's generation_config.json decides for requests that leave it out, as in vLLM."""


@dataclasses.dataclass
class Service:
    """A model that is served.

    Attributes:
      engine: what decodes.
      names: the names that requests may call the model by; the first one is in the answers.
      metrics_prefix: before the names of metrics.
      request_seconds: the time limit of a request; None for none.
      is_ready: whether its programs are compiled and it takes requests.
    """

    engine: AsyncLLM
    names: Sequence[str]
    metrics_prefix: str = "spec_jax:"
    request_seconds: float | None = None
    is_ready: bool = False

    def __post_init__(self) -> None:
        llm = self.engine.llm
        scheduler = llm.dispatcher.scheduler
        self.metrics = Metrics(
            self.names[0],
            self.metrics_prefix,
            running=lambda: scheduler.num_running,
            waiting=lambda: scheduler.num_waiting,
            slots=lambda: llm.max_num_seqs,
        )
        self.created = int(time.time())
        template = self.tokenizer.chat_template
        source = None if template is None else template.source
        self.tool_format: Format | None = tool_format(source)
        self.reasons = reasons(source)
        self.knows_developer = "developer" in (source or "")

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.names[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.llm.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.engine.llm.max_model_len

    def defaults(self, max_tokens: int | None) -> Mapping[str, Any]:
        """The parameters of a request that gives none."""
        model = self.engine.llm.get_default_sampling_params()
        plain = SamplingParams()
        named = {
            name: getattr(model, name)
            for name in _DEFAULTS
            if getattr(model, name) != getattr(plain, name)
        }
        return {"temperature": 1.0, "max_tokens": max_tokens} | named

    def check_model(self, fields: Fields) -> None:
        """Refuses requests for another model; one that names none means this one."""
        name = fields.take("model", str)
        if name is not None and name not in self.names:
            message = f"model {name!r} is not served here; {self.name!r} is."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams,
        *,
        may_draft: bool = True,
        prediction: str = "",
    ) -> RequestStream:
        """Queues a request; the errors are `AsyncLLM.submit`'s, and ApiError before it is ready."""
        if not self.is_ready:
            raise unavailable("the server is loading, or is shutting down; ask again later.")
        options: Any = {"may_draft": may_draft, "prediction": prediction}
        return await self.engine.submit(prompts, sampling, **options)

    async def chunks(self, stream: RequestStream) -> AsyncIterator[StreamChunk]:
        """The chunks of a request, which are counted; ends it at its time limit.

        Raises:
          ApiError: a completion failed, or the time is over.
        """
        began = time.perf_counter()
        last: dict[tuple[int, int], float] = {}
        limit = self.request_seconds
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        async with stream:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        chunk = await anext(stream, None)
                except TimeoutError:
                    message = f"the request took more than {limit:g} s, this server's limit."
                    raise ApiError(504, message, "timeout_error", code="timeout") from None
                if chunk is None:
                    return
                self._observe(chunk, began, last)
                if chunk.output is not None and chunk.output.error is not None:
                    message = chunk.output.error
                    raise ApiError(400, message, code="generation_failed")
                yield chunk

    def _observe(
        self, chunk: StreamChunk, began: float, last: dict[tuple[int, int], float]
    ) -> None:
        now, key, metrics = time.perf_counter(), (chunk.index, chunk.sample), self.metrics
        if count := len(chunk.token_ids):
            if key in last:
                for _ in range(count):
                    metrics.between_tokens.observe((now - last[key]) / count)
            else:
                metrics.first_token.observe(now - began)
            last[key] = now
        if chunk.output is not None:
            metrics.end_to_end.observe(now - began)
            metrics.add(chunk.output)
