"""The closing table: how the speculation went."""

import heapq
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from rich.table import Table

from spec_jax.cli.screen import plain_table
from spec_jax.llm import LLM
from spec_jax.outputs import RequestOutput, SpeculativeMetrics


def _total(outputs: Sequence[RequestOutput], slots: int) -> SpeculativeMetrics:
    """The metrics of all results of a call together, which shared this number of slots."""
    metrics = [output.metrics for output in outputs]
    per_position = zip_longest(*(each.accepted_per_position for each in metrics), fillvalue=0)
    counts = ("rounds", "draft_tokens", "accepted_tokens", "prefill_seconds", "completion_tokens")
    return SpeculativeMetrics(
        accepted_per_position=tuple(map(sum, per_position)),
        decode_seconds=_wall([each.decode_seconds for each in metrics], slots),
        compile_seconds=max((each.compile_seconds for each in metrics), default=0.0),
        **{name: sum(getattr(each, name) for each in metrics) for name in counts},
    )


def _wall(seconds: Sequence[float], slots: int) -> float:
    """When all are done, if they are taken in order, each by the slot that is free first."""
    ends = [0.0] * slots
    for each in seconds:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


class Run:
    """The results of one run over all prompts, as one column of the table with its heading."""

    def __init__(self, name: str, outputs: Sequence[RequestOutput], llm: LLM):
        self.name, self.outputs, self.llm = name, outputs, llm
        self.metrics = _total(outputs, llm.max_num_seqs)

    def rows(self) -> dict[str, str]:
        """Label -> value; what does not apply is left out."""
        m = self.metrics
        reasons = Counter(output.finish_reason for output in self.outputs).items()
        alone = len(self.outputs) == 1
        rows = {
            "finish reason": ", ".join(
                reason if alone else f"{count} {reason}" for reason, count in reasons
            ),
            "tokens": str(m.completion_tokens),
            "target calls": str(m.rounds),
        }
        if m.rounds:
            rows["tokens per target call"] = f"{m.mean_acceptance_length:.2f}"
        if m.draft_tokens:
            saved = m.completion_tokens - m.rounds
            share = saved / max(1, m.completion_tokens)
            per_position = (f"{count / m.rounds:.0%}" for count in m.accepted_per_position)
            rows |= {
                "target calls saved": f"{saved} of {m.completion_tokens} ({share:.0%})",
                "drafted tokens accepted": f"{m.accepted_tokens} of {m.draft_tokens} "
                f"({m.draft_acceptance_rate:.0%})",
                "accepted per position": " ".join(per_position),
            }
        return rows | {
            "tokens per second": f"{m.tokens_per_second:.1f}",
            "prefill": f"{m.prefill_seconds:.2f} s",
            "decode": f"{m.decode_seconds:.2f} s",
            "compile": f"{self.llm.engine.compile_seconds:.2f} s",
        }

    def estimate(self) -> dict[str, str]:
        """How much faster it was than plain decoding would have been, if something was drafted.

        By the measured time of a round without a draft if the method has measured it; otherwise
        what the saved target calls would give if drafting took no time.
        """
        m, profiler = self.metrics, self.llm.engine.cost_profiler
        if not (m.draft_tokens and m.decode_seconds):
            return {}
        text = f"at most {m.completion_tokens / m.rounds:.2f}x; --compare measures it"
        if profiler is not None and profiler.costs:
            *_, costs = profiler.costs.values()
            step = float(costs[0])  # K = 0
            tokens = [output.metrics.completion_tokens for output in self.outputs]
            plain = _wall([count * step for count in tokens], self.llm.max_num_seqs)
            text = f"{plain / m.decode_seconds:.2f}x, by the measured time of a plain step"
        return {"estimated speed-up": text}


def same_tokens(run: Run, other: Run) -> list[bool]:
    """For each prompt, whether both runs gave the same tokens."""
    pairs = zip(run.outputs, other.outputs, strict=True)
    return [ours.token_ids == theirs.token_ids for ours, theirs in pairs]


def table(run: Run, plain: Run | None = None, *, greedy: bool = False) -> Table:
    """The statistics of a run, beside the statistics of plain decoding if there are any.

    With `greedy` both are deterministic, so their tokens are compared.
    """
    if plain is None:
        names, columns = [run.name], [run.rows() | run.estimate()]
    else:
        names, columns = [run.name, plain.name], [run.rows(), plain.rows()]
        slow, fast = plain.metrics.tokens_per_second, run.metrics.tokens_per_second
        columns[0]["speed-up"] = f"{fast / slow:.2f}x" if slow else ""
        if greedy:
            same = same_tokens(run, plain)
            differing = f"no: {same.count(False)} of {len(same)} differ"
            columns[0]["same text as plain"] = "yes" if all(same) else differing
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [(label, *(column.get(label, "") for column in columns)) for label in labels]
    result = plain_table(["", *names], [], rows, padding=3, header=plain is not None)
    result.columns[0].style = "dim"
    return result
