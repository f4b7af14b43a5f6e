"""The options of what serves, and of what asks servers. Imports no JAX.

Each class becomes the flags of a command (`flags.py`); its docstring ends the command's help.
"""

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from spec_jax.benchmarking import prompts
from spec_jax.cli.options import Batches, SpeculationOptions
from spec_jax.cli.results_file import refuse_existing
from spec_jax.config import (
    AtLeast0,
    AtLeast1,
    Flag,
    Many,
    NotNegative,
    Positive,
    SamplingParams,
    Text,
    config_class,
)


@config_class
class ServeOptions(Batches, SpeculationOptions):
    """Serve a model over HTTP, with the protocol of the OpenAI API.

    Requests come and go, and are decoded together. GET /health answers 200 once programs are
    compiled. At SIGTERM it takes no more requests and finishes those that it has; a second signal
    ends it at once.
    """

    GROUP: ClassVar[str] = "server"

    sampling: Annotated[SamplingParams, Flag(hidden=True)] = SamplingParams()
    host: Annotated[Text, Flag(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every one of this machine's."""
    port: Annotated[AtLeast0, Field(le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: Annotated[Many[Text], Flag(metavar="KEY")] = ()
    """A key that requests must come with (default: $SPEC_JAX_API_KEY, if it is set)."""
    served_model_name: Annotated[Many[Text], Flag(metavar="NAME")] = ()
    """What requests call the model; the first one stands in answers (default: its name)."""
    max_queue: AtLeast0 = 256
    """Most requests that wait while others are decoded; more are answered with 429."""
    request_timeout: Annotated[Positive | None, Flag(metavar="SECONDS")] = None
    """End a request after this time."""
    shutdown_timeout: Annotated[NotNegative, Flag(metavar="SECONDS")] = 30.0
    """How long requests may take after SIGTERM."""
    allow_origin: Annotated[Many[Text], Flag(metavar="ORIGIN")] = ()
    """Let web pages of this origin ask; * is any origin."""
    metrics_prefix: Annotated[str, Flag(metavar="PREFIX")] = "spec_jax:"
    """What names of metrics begin with; vllm: fits the dashboards of vLLM."""
    lazy: bool = False
    """Compile programs when they are first needed, not before."""

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Takes the key from the environment, where nobody else on the machine sees it."""
        if not values.get("api_key") and (key := os.environ.get("SPEC_JAX_API_KEY")):
            values["api_key"] = (key,)


@config_class
class ChatUrlOptions:
    """Hold a conversation with the model of a server, of the OpenAI API.

    What is not given is decided by the server.
    """

    GROUP: ClassVar[str] = "server"

    url: Annotated[Text, Flag(metavar="URL", remedy="name the server with --url")]
    """The server, such as http://127.0.0.1:8000."""
    api_key: Annotated[Text | None, Flag(metavar="KEY")] = None
    """The key that it asks for."""
    model: Annotated[Text | None, Flag(metavar="NAME")] = None
    """The model (default: the server's first one)."""
    system: str | None = None
    """Tell the model how to answer."""
    max_tokens: AtLeast1 | None = None
    """Most tokens of an answer."""
    temperature: Annotated[NotNegative | None, Flag(metavar="T")] = None
    """Temperature of sampling."""
    top_p: Annotated[Positive | None, Flag(metavar="P")] = None
    """Keep the likeliest tokens that reach probability P."""
    seed: AtLeast0 | None = None
    """Make sampling reproducible."""
    stop: Annotated[Many[Text], Flag(metavar="TEXT")] = ()
    """End an answer before this text."""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of requests that were given."""
        names = ("max_tokens", "temperature", "top_p", "seed")
        values = {name: getattr(self, name) for name in names}
        values |= {"stop": [*self.stop] or None}
        return {name: value for name, value in values.items() if value is not None}


@config_class
class BenchServeOptions:
    """Measure how fast a server of the OpenAI API answers.

    Each row of the table is a load: --concurrency clients that ask again once they have an answer,
    or --rate requests a second that come whether others were answered or not, at random (Poisson).
    Before the first load one request is asked that does not count.

    First: to the first piece of an answer. Token: of each token after it, mean of a request.
    Goodput: answers a second that kept both limits. Accepted: of drafted tokens, where the server
    tells (spec-jax does, and vLLM).
    """

    GROUP: ClassVar[str] = "server, and what to ask"

    serve: Annotated[Text, Flag(metavar="URL", remedy="name the server with --serve")]
    """The server, such as http://127.0.0.1:8000."""
    api_key: Annotated[Text | None, Flag(metavar="KEY")] = None
    """The key that it asks for."""
    model: Annotated[Text | None, Flag(metavar="NAME")] = None
    """The model (default: the server's first one)."""
    concurrency: Many[AtLeast1] = (1, 8)
    """Clients that ask at the same time."""
    rate: Annotated[Many[Positive], Flag(metavar="R")] = ()
    """Requests a second, instead of clients."""
    prompt_set: Annotated[
        Text, Flag(metavar="|".join((*prompts.BUILT_IN, prompts.HUMANEVAL, "FILE")))
    ] = "chat"
    """Prompts; FILE.jsonl is the same as of `spec-jax bench`."""
    lengths: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Instead of prompts, random tokens as long as a file says. Each of its lines has the tokens of
    a prompt and of its answer, two numbers."""
    num_requests: AtLeast1 = 64
    """Requests of each load; prompts are repeated if there are fewer."""
    max_tokens: AtLeast1 = 64
    """Most tokens of an answer."""
    temperature: Annotated[NotNegative, Flag(metavar="T")] = 0.0
    """Temperature of sampling; 0 is greedy."""
    ignore_eos: bool = False
    """Decode past the end of sequence."""
    first_limit: Annotated[Positive, Flag(metavar="MS")] = 1000.0
    """Milliseconds to the first piece that count for goodput."""
    token_limit: Annotated[Positive, Flag(metavar="MS")] = 100.0
    """Milliseconds a token that count for goodput."""
    seed: AtLeast0 = 0
    """Seed of the times at which requests come, and of random tokens."""
    output: Annotated[Path | None, Flag(name="out")] = None
    """Write each request to this file, as JSON lines."""

    def __post_init__(self) -> None:
        if self.output is not None:
            refuse_existing(self.output)
