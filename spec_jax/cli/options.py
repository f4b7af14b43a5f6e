"""Groups of options that several commands have. Imports no JAX."""

import argparse
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from spec_jax.cli.flags import Group
from spec_jax.cli.parser import json_object
from spec_jax.config import (
    AtLeast1,
    Flag,
    LoadingOptions,
    NoDraftConfig,
    SamplingParams,
    SpeculativeConfig,
    Text,
    config_class,
)
from spec_jax.errors import RequestError
from spec_jax.text.messages import checked_tools
from spec_jax.text.prompt_files import read_text

DISTRIBUTION = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Options that decide what the next token's distribution is."""
PYTHON_ONLY = (
    *("n", "logit_bias", "allowed_token_ids", "prompt_logprobs", "truncate_prompt_tokens"),
    *("detokenize", "skip_special_tokens", "include_stop_str_in_output"),
)
"""Options of `SamplingParams` that a command does without."""
LayoutFile = Annotated[str, Flag(metavar="FILE")]
Speculation = Annotated[SpeculativeConfig, Group(title="speculative decoding")]


class Source(NamedTuple):
    """Where a prompt comes from: text as given, or a file."""

    kind: str
    value: str


@config_class
class ModelOptions(LoadingOptions):
    """A target, and how it is held."""

    GROUP: ClassVar[str] = "model"

    target: Annotated[
        Text,
        Flag(
            metavar="REF",
            also="model",
            remedy="name the model with --target: a Hugging Face directory, a .gguf file, a recipe "
            "(.toml) or a hub id",
        ),
    ]
    """The model: a Hugging Face directory, one that `spec-jax convert` wrote, a .gguf file, a
    recipe (.toml), a name such as smollm2-135m-instruct, gs://BUCKET/FOLDER, s3://BUCKET/FOLDER or
    a hub id org/name[@revision]."""
    layout: LayoutFile | None = None
    """How models are sharded over several devices or processes: a layout file, or a name such as
    cpu-8 (default: one device)."""
    max_model_len: AtLeast1 | None = None
    """Most tokens of prompt and completion together (default: the model's context)."""

    @property
    def llm(self) -> dict[str, Any]:
        """Arguments of `LLM` besides the target that are not the defaults."""
        fields = (*dataclasses.fields(ModelOptions), *dataclasses.fields(Batches))
        return {
            each.name: value
            for each in fields
            if each.name != "target"
            and (value := getattr(self, each.name, each.default)) != each.default
        }


@config_class
class Batches:
    """How many prompts are decoded at once."""

    GROUP: ClassVar[str] = "model"

    max_num_seqs: AtLeast1 = 8
    """Most prompts decoded as one batch."""


@config_class
class SpeculationOptions(ModelOptions):
    """A target, and how it is decoded."""

    speculative: Speculation = NoDraftConfig()
    sampling: SamplingParams = SamplingParams()


def _add_prompts(group: Any, place: str) -> None:
    add = functools.partial(group.add_argument, dest=place, action="append")
    text, file = (functools.partial(Source, kind) for kind in ("text", "file"))
    add("--prompt", type=text, metavar="TEXT", help="a prompt (repeatable)")
    add(
        "--prompt-file",
        type=file,
        metavar="FILE",
        help='.jsonl: one object a line, with the key "prompt", or "messages" and optionally '
        '"tools"; any other file is one prompt; - is standard input (repeatable)',
    )


@config_class
class PromptOptions:
    """Prompts that flags name."""

    GROUP: ClassVar[str] = "prompts"

    named: Annotated[tuple[Any, ...], Flag(add=_add_prompts)] = ()

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where the prompts come from, in order."""
        return self.named


def _functions(file: str) -> list[dict[str, Any]]:
    """The functions that a file holds, for `Flag.read`."""
    try:
        text = read_text(Path(file), file, kind="list of functions")
        return checked_tools(json.loads(text), file)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{file} is not JSON: {error}") from None


@config_class
class ChatTemplateOptions:
    """What a chat template gets besides the messages."""

    GROUP: ClassVar[str] = "chat template"

    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None, Flag(read=json_object, metavar="JSON")
    ] = None
    """Variables of the chat template, such as '{"enable_thinking": false}'."""


@config_class
class CompletedPrompts(ChatTemplateOptions, PromptOptions):
    """Prompts that are completed, one of which may stand alone."""

    GROUP: ClassVar[str] = "prompts"

    prompt: Annotated[str | None, Flag(positional=True, metavar="PROMPT")] = None
    """A prompt."""
    chat: Annotated[bool, Flag(off="raw")] = False
    """Put prompts through the model's chat template; conversations go through it in any case."""
    tools: Annotated[Sequence[Mapping[str, Any]] | None, Flag(read=_functions, metavar="FILE")] = (
        None
    )
    """A JSON list of functions that the chat template describes to the model."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where the prompts come from: first the one that stands alone, then the named ones."""
        alone = () if self.prompt is None else (Source("text", self.prompt),)
        return (*alone, *self.named)
