"""The closing table: how the speculation went."""

import heapq
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from rich.table import Table

from spec_jax.llm import LLM
from spec_jax.outputs import RequestOutput, SpeculativeMetrics


def total(outputs: Sequence[RequestOutput], slots: int) -> SpeculativeMetrics:
    """The metrics of all results of a call together, which shared this number of slots."""
    metrics = [output.metrics for output in outputs]
    per_position = zip_longest(*(each.accepted_per_position for each in metrics), fillvalue=0)
    return SpeculativeMetrics(
        rounds=sum(each.rounds for each in metrics),
        draft_tokens=sum(each.draft_tokens for each in metrics),
        accepted_tokens=sum(each.accepted_tokens for each in metrics),
        accepted_per_position=tuple(map(sum, per_position)),
        prefill_seconds=sum(each.prefill_seconds for each in metrics),
        decode_seconds=_wall([each.decode_seconds for each in metrics], slots),
        compile_seconds=max((each.compile_seconds for each in metrics), default=0.0),
        completion_tokens=sum(each.completion_tokens for each in metrics),
    )


def _wall(seconds: Sequence[float], slots: int) -> float:
    """When all are done, if they are taken in order, each by the slot that is free first."""
    ends = [0.0] * slots
    for each in seconds:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


class Run:
    """One run over all prompts, as one column of the table.

    Args:
      name: the column's heading.
      outputs: the results.
      llm: what decoded them.
    """

    def __init__(self, name: str, outputs: Sequence[RequestOutput], llm: LLM):
        self.name, self.outputs, self.llm = name, outputs, llm
        self.metrics = total(outputs, llm.max_num_seqs)

    def rows(self) -> dict[str, str]:
        """Label -> value; what does not apply is left out."""
        m = self.metrics
        reasons = Counter(output.finish_reason for output in self.outputs)
        alone = len(self.outputs) == 1
        rows = {
            "finish reason": ", ".join(
                reason if alone else f"{count} {reason}" for reason, count in reasons.items()
            ),
            "tokens": str(m.completion_tokens),
            "target calls": str(m.rounds),
        }
        if m.rounds:
            rows["tokens per target call"] = f"{m.mean_acceptance_length:.2f}"
        if m.draft_tokens:
            saved = m.completion_tokens - m.rounds
            share = saved / m.completion_tokens if m.completion_tokens else 0
            rows["target calls saved"] = f"{saved} of {m.completion_tokens} ({share:.0%})"
            rows["drafted tokens accepted"] = (
                f"{m.accepted_tokens} of {m.draft_tokens} ({m.draft_acceptance_rate:.0%})"
            )
            rows["accepted per position"] = " ".join(
                f"{count / m.rounds:.0%}" for count in m.accepted_per_position
            )
        rows["tokens per second"] = f"{m.tokens_per_second:.1f}"
        rows["prefill"] = f"{m.prefill_seconds:.2f} s"
        rows["decode"] = f"{m.decode_seconds:.2f} s"
        rows["compile"] = f"{self.llm.engine.compile_seconds:.2f} s"
        return rows

    def estimate(self) -> str | None:
        """How much faster it was than plain decoding would have been; None if nothing was drafted.

        By the measured time of a round without a draft if the method has measured it; otherwise
        what the saved target calls would give if drafting took no time.
        """
        m = self.metrics
        if not (m.draft_tokens and m.decode_seconds):
            return None
        if seconds := self._plain_round():
            counts = [output.metrics.completion_tokens for output in self.outputs]
            plain = _wall([count * seconds for count in counts], self.llm.max_num_seqs)
            return f"{plain / m.decode_seconds:.2f}x, by the measured time of a plain step"
        return f"at most {m.completion_tokens / m.rounds:.2f}x; --compare measures it"

    def _plain_round(self) -> float | None:
        profiler = self.llm.engine.cost_profiler
        if profiler is None or not profiler.costs or 0 not in profiler.policy.choices:
            return None
        *_, costs = profiler.costs.values()
        return float(costs[profiler.policy.choices.index(0)])


def same_tokens(run: Run, other: Run) -> list[bool]:
    """For each prompt, whether both runs gave the same tokens."""
    pairs = zip(run.outputs, other.outputs, strict=True)
    return [ours.token_ids == theirs.token_ids for ours, theirs in pairs]


def table(run: Run, plain: Run | None = None, *, greedy: bool = False) -> Table:
    """The statistics of a run, beside the statistics of plain decoding if there are any.

    Args:
      run: the run with speculation.
      plain: the same prompts decoded plainly.
      greedy: both are deterministic, so their tokens can be compared.
    """
    runs = [run] if plain is None else [run, plain]
    result = Table(box=None, pad_edge=False, show_header=plain is not None, padding=(0, 3, 0, 0))
    result.add_column("", style="dim", no_wrap=True)
    for each in runs:
        result.add_column(each.name, overflow="fold")
    columns = [each.rows() for each in runs]
    for label in dict.fromkeys(label for column in columns for label in column):
        result.add_row(label, *(column.get(label, "") for column in columns))
    if plain is None:
        if estimate := run.estimate():
            result.add_row("estimated speed-up", estimate)
    else:
        slow, fast = plain.metrics.tokens_per_second, run.metrics.tokens_per_second
        result.add_row("speed-up", f"{fast / slow:.2f}x" if slow else "")
        if greedy:
            same = same_tokens(run, plain)
            word = "yes" if all(same) else f"no: {same.count(False)} of {len(same)} differ"
            result.add_row("same text as plain", word)
    return result
