"""The compared systems: plain decoding, and each method, K, policy, verification and scoring."""

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from spec_jax.benchmarking.results import BenchRequest, Setting, System
from spec_jax.config import METHODS, SamplingParams, SpeculativeConfig, option_names
from spec_jax.errors import BenchmarkError, ConfigError, GenerationError
from spec_jax.llm import LLM
from spec_jax.outputs import RequestOutput

NAMESPACE = "benchmark"
"""Prefix of the namespaces of `suffix`: each run has another one, so that all start empty."""


class EncodedPrompt(NamedTuple):
    """A prompt's number in its set, its token ids and its category."""

    number: int
    token_ids: list[int]
    category: str = ""


@dataclasses.dataclass(frozen=True)
class BenchTask:
    """Prompts that a system decodes in one call, `batch_size` of them together.

    With `ignore_eos` every answer has `max_tokens` tokens. The name is unique for each run.
    """

    prompts: Sequence[EncodedPrompt]
    seeds: Sequence[int]
    setting: Setting
    max_tokens: int
    ignore_eos: bool
    batch_size: int
    name: str

    def warm_up(self) -> "BenchTask":
        """A short task that compiles whatever this task compiles."""
        pairs = list(zip(self.prompts, self.seeds, strict=True))
        # The longest prompt decides about shapes; one prompt more than rows is inserted later.
        longest = pairs.pop(max(range(len(pairs)), key=lambda i: len(pairs[i][0].token_ids)))
        prompts, seeds = zip(longest, *pairs[: self.batch_size], strict=True)
        return dataclasses.replace(self, prompts=prompts, seeds=seeds, name=f"{self.name}, warm-up")


class Runner(Protocol):
    """A system that is ready to decode."""

    system: System

    def can(self, setting: Setting, batch_size: int) -> bool:
        """Whether it supports this setting and batch size."""
        ...

    def run(self, task: BenchTask) -> tuple[float, list[BenchRequest]]:
        """Returns the seconds of the whole call, without compilation, and the requests."""
        ...


def digest(token_ids: Sequence[int]) -> str:
    """A checksum of tokens."""
    return hashlib.sha256(np.asarray(token_ids, np.int64).tobytes()).hexdigest()[:16]


@dataclasses.dataclass
class Ours:
    """One way of decoding with `LLM`."""

    system: System
    llm: LLM

    def can(self, setting: Setting, batch_size: int) -> bool:
        """Every setting."""
        return True

    def run(self, task: BenchTask) -> tuple[float, list[BenchRequest]]:
        """Decodes all prompts in one call; a free row takes the next prompt."""
        self.llm.max_num_seqs = task.batch_size
        params = [
            SamplingParams(
                max_tokens=task.max_tokens,
                ignore_eos=task.ignore_eos,
                temperature=task.setting.temperature,
                top_p=task.setting.top_p,
                seed=seed,
                namespace=f"{NAMESPACE}, {task.name}",
            )
            for seed in task.seeds
        ]
        compiled, begin = self.llm.engine.compile_seconds, time.perf_counter()
        try:
            outputs = self.llm.generate([prompt.token_ids for prompt in task.prompts], params)
        except GenerationError as error:
            raise error.__cause__ or error from None
        seconds = time.perf_counter() - begin - (self.llm.engine.compile_seconds - compiled)
        pairs = zip(task.prompts, outputs, strict=True)
        return max(seconds, 0.0), [self._request(*each) for each in pairs]

    def _request(self, prompt: EncodedPrompt, output: RequestOutput) -> BenchRequest:
        if output.error is not None:
            raise BenchmarkError(
                f"{self.system.name} failed at prompt {prompt.number}: {output.error}; leave "
                "it out."
            )
        metrics = output.metrics
        round_seconds = metrics.decode_seconds / metrics.rounds if metrics.rounds else 0.0
        return BenchRequest(
            prompt=prompt.number,
            category=prompt.category,
            prompt_tokens=output.usage.prompt_tokens,
            tokens=output.usage.completion_tokens,
            finish_reason=output.finish_reason,
            digest=digest(output.token_ids),
            rounds=metrics.rounds,
            draft_tokens=metrics.draft_tokens,
            accepted_tokens=metrics.accepted_tokens,
            accepted_per_position=metrics.accepted_per_position,
            first_token_seconds=metrics.prefill_seconds + round_seconds,
            seconds=metrics.prefill_seconds + metrics.decode_seconds,
            decode_seconds=metrics.decode_seconds,
        )


def grid(
    methods: Sequence[str],
    lookaheads: Sequence[int],
    *,
    policies: Sequence[str] = ("constant",),
    verifications: Sequence[str] = ("coupled",),
    scorings: Sequence[str] = ("block",),
    options: Mapping[str, Any] | None = None,
) -> list[SpeculativeConfig]:
    """Every combination that the methods support, without plain decoding (K = 0).

    `options` are further options, each for the methods that have it.

    Raises:
      ConfigError: a method supports none of the combinations.
    """
    configs: list[SpeculativeConfig] = []
    for method in dict.fromkeys(each for each in methods if each != "none"):
        supported = option_names(METHODS.get(method, SpeculativeConfig))
        fields = {name: value for name, value in (options or {}).items() if name in supported}
        refusal, count = None, len(configs)
        for k, policy, verification, scoring in itertools.product(
            [k for k in lookaheads if k], policies, verifications, scorings
        ):
            try:
                config = SpeculativeConfig(
                    method=method,
                    num_speculative_tokens=k,
                    draft_length_policy=policy,
                    verification=verification,
                    scoring=scoring,
                    **fields,
                )
            except ConfigError as error:
                refusal = error
                continue
            if config not in configs:
                configs.append(config)
        if refusal and len(configs) == count:
            raise refusal
    return configs


def system_of(config: SpeculativeConfig, library: str | None = None) -> System:
    """The system of a configuration, by default of this library."""
    system = System(
        name="-",
        method=config.method,
        num_speculative_tokens=config.lookahead,
        draft_length_policy=config.draft_length_policy,
        verification=config.verification,
        scoring=config.scoring,
        **({"library": library} if library else {}),
    )
    k = "" if system.is_plain else f", K = {system.num_speculative_tokens}"
    return system.model_copy(update={"name": f"{system.family}{k}"})


def prepare(llm: LLM, configs: Sequence[SpeculativeConfig]) -> Iterator[Ours]:
    """Makes the systems one by one; they share the target's and the drafts' weights."""
    for config in (SpeculativeConfig(), *configs):
        llm = llm.with_speculation(config)
        yield Ours(system_of(config), llm)


def one_of_each(runners: Sequence[Runner]) -> list[Runner]:
    """Systems that differ in more than verification; at temperature 0 all keep the same tokens."""
    distinct: dict[System, Runner] = {}
    for runner in runners:
        system = runner.system.model_copy(update={"verification": "-", "name": "-"})
        distinct.setdefault(system, runner)
    return list(distinct.values())
