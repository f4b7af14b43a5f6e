"""What is compared: plain decoding, and each asked method, K, policy, verification and scoring."""

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from spec_jax.benchmarking.results import Request, Setting, System
from spec_jax.config import METHODS, SamplingParams, SpeculativeConfig, option_names
from spec_jax.errors import BenchmarkError, ConfigError, GenerationError
from spec_jax.llm import LLM
from spec_jax.outputs import RequestOutput

NAMESPACE = "benchmark"
"""Where `suffix` keeps outputs; each run has a namespace of its own, so that it starts alike."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What a system decodes at once.

    Attributes:
      numbers: of the prompts in their set.
      prompts: token ids.
      categories: of the prompts.
      setting: how to sample.
      seeds: one a prompt.
      max_tokens: most tokens of each.
      ignore_eos: whether all have so many.
      batch_size: rows decoded together.
      name: of the run, different for each.
    """

    numbers: Sequence[int]
    prompts: Sequence[list[int]]
    categories: Sequence[str]
    setting: Setting
    seeds: Sequence[int]
    max_tokens: int
    ignore_eos: bool
    batch_size: int
    name: str

    def warm_up(self) -> "Task":
        """A short task of the same shapes: whatever the task compiles, this compiles."""
        longest = max(range(len(self.prompts)), key=lambda i: len(self.prompts[i]))
        # One more than there are rows, so that a row joins; the longest decides about shapes.
        others = [i for i in range(len(self.prompts)) if i != longest][: self.batch_size]
        chosen = [longest, *others]
        return dataclasses.replace(
            self,
            numbers=[self.numbers[i] for i in chosen],
            prompts=[self.prompts[i] for i in chosen],
            categories=[self.categories[i] for i in chosen],
            seeds=[self.seeds[i] for i in chosen],
            name=f"{self.name}, warm-up",
        )


class Runner(Protocol):
    """A system that is ready to decode."""

    system: System

    def can(self, setting: Setting, batch_size: int) -> bool:
        """Whether it decodes so."""
        ...

    def run(self, task: Task) -> tuple[float, list[Request]]:
        """Decodes; returns seconds of the whole call without compilation, and each request."""
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
        """Verification `greedy` is for temperature 0."""
        return not (self.system.verification == "greedy" and setting.temperature)

    def run(self, task: Task) -> tuple[float, list[Request]]:
        """Decodes all prompts in one call; free rows are given to the next prompts."""
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
            outputs = self.llm.generate(list(task.prompts), params)
        except GenerationError as error:
            raise error.__cause__ or error from None
        seconds = time.perf_counter() - begin - (self.llm.engine.compile_seconds - compiled)
        places = zip(task.numbers, task.categories, outputs, strict=True)
        return max(seconds, 0.0), [self._request(*each) for each in places]

    def _request(self, number: int, category: str, output: RequestOutput) -> Request:
        if output.error is not None:
            raise BenchmarkError(
                f"{self.system.name} failed at prompt {number}: {output.error}; leave it out."
            )
        metrics = output.metrics
        a_round = metrics.decode_seconds / metrics.rounds if metrics.rounds else 0.0
        return Request(
            prompt=number,
            category=category,
            prompt_tokens=output.usage.prompt_tokens,
            tokens=output.usage.completion_tokens,
            finish_reason=output.finish_reason,
            digest=digest(output.token_ids),
            rounds=metrics.rounds,
            draft_tokens=metrics.draft_tokens,
            accepted_tokens=metrics.accepted_tokens,
            accepted_per_position=metrics.accepted_per_position,
            first_token_seconds=metrics.prefill_seconds + a_round,
            seconds=metrics.prefill_seconds + metrics.decode_seconds,
            decode_seconds=metrics.decode_seconds,
        )


def grid(
    methods: Sequence[str],
    lookaheads: Sequence[int],
    *,
    policies: Sequence[str] = ("constant",),
    verifications: Sequence[str] = ("token",),
    scorings: Sequence[str] = ("block",),
    options: Mapping[str, Any] | None = None,
) -> list[SpeculativeConfig]:
    """Every combination that the methods support; plain decoding is not among them.

    Args:
      methods: how to draft.
      lookaheads: K; 0, which is plain decoding, is left out.
      policies: of draft lengths.
      verifications: which drafted tokens to keep.
      scorings: how the target scores a draft.
      options: further options, each for the methods that have it.

    Raises:
      ConfigError: a method supports none of the combinations.
    """
    found: list[SpeculativeConfig] = []
    for method in dict.fromkeys(each for each in methods if each != "none"):
        names = option_names(METHODS.get(method, SpeculativeConfig))
        own = {name: value for name, value in (options or {}).items() if name in names}
        refusal, before = None, len(found)
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
                    **own,
                )
            except ConfigError as error:
                refusal = error
                continue
            if config not in found:
                found.append(config)
        if refusal and len(found) == before:
            raise refusal
    return found


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
    """Makes the systems one by one; they share the target's weights, and drafts among them."""
    for config in (SpeculativeConfig(), *configs):
        llm = llm.with_speculation(config)
        yield Ours(system_of(config), llm)


def one_of_each(runners: Sequence[Runner]) -> list[Runner]:
    """The systems that differ in more than verification.

    At temperature 0 every verification keeps the tokens that the target finds most likely.
    """
    found: dict[System, Runner] = {}
    for runner in runners:
        other = runner.system.model_copy(update={"verification": "-", "name": "-"})
        found.setdefault(other, runner)
    return list(found.values())
