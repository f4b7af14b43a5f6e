"""Tests sampled tokens against the target's distribution, and drafted tokens against q."""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from spec_jax.config import SamplingParams
from spec_jax.engine.requests import RequestInput
from spec_jax.evaluation import statistics
from spec_jax.evaluation.recorder import Round
from spec_jax.evaluation.reference import one_hot, reference_probabilities
from spec_jax.evaluation.scoring import Scorer
from spec_jax.evaluation.statistics import Binned, Tally
from spec_jax.evaluation.verdict import Check

EMITTED = "sampled: follow p"
FOLLOWING = "sampled: after a verdict"
DRAFTED = "drafted: follow q"
MEANINGS = {
    EMITTED: "emitted tokens do not follow the target's distribution",
    FOLLOWING: "given how many were accepted, the next token follows neither max(p - q, 0) nor the "
    "bonus p: the residual is wrong, or shares random numbers with the acceptance",
    DRAFTED: "drafted tokens do not follow the reported q, or share random numbers",
}
MIN_RESIDUAL = 1e-3
"""If p and q differ by less than this in total, the residual consists of rounding errors."""
SUM_TOLERANCE = 1e-3
REJECTED = "after a rejection"
"""Part of the names of the tests that need rejected tokens."""
RELAXED = {"float32": 1e-3, "bfloat16": 0.1}
"""How much closer to the cut of top-k, top-p or min-p rounding may bring a token."""


class SampledChecks:
    """The checks of sampled tokens, as sums over all rows.

    The scorer computes the target's logits without speculation; verification and whether it drafts
    are the method's. `coupled` verification uses neither a residual nor q, so that only emitted
    tokens are tested. The seed is for the audit's random numbers, which decoding does not use.
    """

    def __init__(self, scorer: Scorer, verification: str, drafts: bool, seed: int):
        self._scorer, self._verification, self._drafts = scorer, verification, drafts
        self._exact = scorer.model.dtype == jnp.float32
        self._random = np.random.default_rng(seed)
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._first: dict[tuple[str, int], np.ndarray] = {}
        self._drafted: dict[tuple, tuple] = {}
        self.emitted, self.following, self.drafted = map(Check, (EMITTED, FOLLOWING, DRAFTED))
        self.rows = self._several = 0

    def add(
        self,
        setting: str,
        params: SamplingParams,
        prompts: Sequence[RequestInput],
        which: Int[np.ndarray, " batch"],
        tokens: Int[np.ndarray, "batch length"],
        rounds: Sequence[Round],
    ) -> None:
        """Adds a decoded batch: each row's prompt and output, and its rounds.

        `setting` names the sampling parameters, and `which` is each row's prompt.
        """
        width = params.token_limit
        begin = np.array([len(prompts[i]) for i in which])
        texts = np.stack([row[at : at + width] for row, at in zip(tokens, begin, strict=True)])
        self.rows += len(which)
        at = np.zeros(texts.shape)
        for i, prompt in enumerate(prompts):
            mine, ids = np.flatnonzero(which == i), prompt.prompt_token_ids
            for chunk in np.split(mine, range(self._scorer.rows, len(mine), self._scorer.rows)):
                if len(chunk):
                    logits = self._scorer.logits(prompt, texts[chunk])
                    p = self._target(setting, params, i, ids, texts[chunk], logits)
                    at[chunk] = self._add_emitted(setting, texts[chunk], p)
                    self._add_impossible(params, ids, texts[chunk], p, logits)
                    for each in rounds if self._verification != "coupled" else ():
                        self._add_round(setting, each, chunk, begin[chunk], texts[chunk], p)
        for t in range(1, width):
            pairs = statistics.by_pair(at[:, t - 1], at[:, t])
            self._add(self.emitted, f"{setting}, neighbours in a row", pairs)
        pairs = statistics.by_pair(at[:-1].ravel(), at[1:].ravel())
        self._add(self.emitted, f"{setting}, neighbouring rows", pairs)
        for each in rounds if self._verification != "coupled" else ():
            self._add_draft(setting, each, which, begin, texts)

    def checks(self) -> list[Check]:
        """The checks with their tests, not corrected for each other yet."""
        checks = [self.emitted, self.following, self.drafted]
        for (name, test_name), tally in self._tallies.items():
            check = next(each for each in checks if each.name == name)
            if (test := tally.test(test_name)) is not None:
                check.tests.append(test)
        for check in checks:
            counted = max((test.count for test in check.tests), default=0)
            seen = f"{counted} tokens" if check.tests else f"{check.comparisons} drafts"
            check.sample = f"{self.rows} rows, {seen}"
        if not self._drafts:
            for check in (self.following, self.drafted):
                check.leave_out("plain decoding drafts nothing", excused=True)
            return checks
        if self._verification == "coupled":
            self.following.leave_out("coupled verification draws from p alone", excused=True)
            self.drafted.leave_out("coupled verification does not use q", excused=True)
            return checks
        if self._several:
            self.following.leave_out("no law is known for several drafts a row", excused=True)
        elif not self._exact:
            self.following.leave_out(
                "rounding in bfloat16 exceeds the differences of p and q that it is made of",
                excused=True,
            )
        elif not any(REJECTED in test.name for test in self.following.tests):
            self.following.leave_out("too few drafted tokens were rejected")
        if not self.drafted.tests and not self.drafted.comparisons:
            self.drafted.leave_out("nothing was drafted")
        return checks

    def _add(self, check: Check, name: str, binned: Binned) -> None:
        drawn, expected = binned
        if len(drawn):
            tally = self._tallies.setdefault((check.name, name), Tally(expected.shape[1]))
            tally.add(drawn, expected)

    def _target(
        self,
        setting: str,
        params: SamplingParams,
        number: int,
        prompt: list[int],
        texts: Int[np.ndarray, "rows width"],
        logits: Float[np.ndarray, "rows width vocab"],
    ) -> Float[np.ndarray, "rows width vocab"]:
        """Each token's exact distribution given those before it."""
        p, key = np.zeros(logits.shape), (setting, number)
        for row, t in np.ndindex(texts.shape):
            # All rows of a prompt share the first position.
            if t == 0 and key in self._first:
                p[row, 0] = self._first[key]
                continue
            context = [*prompt, *texts[row, :t].tolist()]
            p[row, t] = reference_probabilities(logits[row, t], context, len(prompt), params)
            self._first.setdefault(key, p[row, 0])
        return p

    def _add_emitted(
        self, setting: str, texts: np.ndarray, p: Float[np.ndarray, "rows width vocab"]
    ) -> Float[np.ndarray, "rows width"]:
        """Adds every token, by position and pooled; returns its quantile in its distribution."""
        at = np.zeros(texts.shape)
        for t in range(texts.shape[1]):
            drawn = texts[:, t].astype(np.int64)
            binned = statistics.by_token(p[:, t], drawn)
            at[:, t] = statistics.quantiles(p[:, t], drawn, self._random)
            self._add(self.emitted, f"{setting}, token {t}", binned)
            self._add(self.emitted, f"{setting}, all tokens", binned)
            rarity = statistics.by_rarity(p[:, t], drawn)
            self._add(self.emitted, f"{setting}, rare and common tokens", rarity)
            self._add(self.emitted, f"{setting}, by order of ids", statistics.by_quantile(at[:, t]))
        return at

    def _add_impossible(
        self,
        params: SamplingParams,
        prompt: list[int],
        texts: np.ndarray,
        p: Float[np.ndarray, "rows width vocab"],
        logits: Float[np.ndarray, "rows width vocab"],
    ) -> None:
        """Checks that no token of probability 0 was emitted, except at the edge of a truncation."""
        emitted = np.take_along_axis(p, texts[..., None].astype(np.int64), axis=2)[..., 0]
        self.emitted.comparisons += emitted.size
        for row, t in np.argwhere(emitted == 0):
            context = [*prompt, *texts[row, :t].tolist()]
            if not self._at_edge(params, context, len(prompt), int(texts[row, t]), logits[row, t]):
                self.emitted.compare(
                    False,
                    "a token was emitted where its probability is exactly zero: truncation or a "
                    "bias is not honoured.",
                )
                return  # one is enough

    def _at_edge(
        self,
        params: SamplingParams,
        context: list[int],
        prompt_length: int,
        token: int,
        logits: Float[np.ndarray, " vocab"],
    ) -> bool:
        """Whether a token passes the truncation if rounding errors favour it."""
        relaxed = RELAXED[self._scorer.model.dtype.name]
        favoured = logits.copy()
        favoured[token] += relaxed * max(1.0, float(np.abs(logits).max()) / 10)
        wider = dataclasses.replace(
            params,
            top_p=min(1.0, params.top_p + relaxed * (1 - params.top_p)),
            min_p=params.min_p * (1 - relaxed),
        )
        return bool(reference_probabilities(favoured, context, prompt_length, wider)[token] > 0)

    def _add_round(
        self,
        setting: str,
        played: Round,
        chunk: Int[np.ndarray, " rows"],
        begin: Int[np.ndarray, " rows"],
        texts: np.ndarray,
        p: Float[np.ndarray, "rows width vocab"],
    ) -> None:
        """Adds a round's first token by p against q, and its last against the rule's residual."""
        several = played.draft.num_drafts > 1
        self._several += several
        start = played.start[chunk] - begin
        emitted, accepted = played.emitted[chunk], played.accepted[chunk]
        # Not the counter of drafted tokens, since a policy may count only accepted tokens.
        lengths = played.draft.lengths[chunk]
        rows = np.flatnonzero((emitted > 0) & (lengths > 0))
        if not len(rows):
            return
        vocab = p.shape[2]

        def q(rows: np.ndarray, at: int) -> np.ndarray:
            draft = played.draft
            if draft.probs is None:
                return one_hot(draft.tokens[chunk[rows], at], vocab)
            return draft.probs[chunk[rows], at].astype(np.float64)

        drawn = texts[rows, start[rows]].astype(np.int64)
        ratio = statistics.by_ratio(p[rows, start[rows]], q(rows, 0), drawn)
        self._add(self.emitted, f"{setting}, first of a round by p / q", ratio)
        if several or not self._exact:
            return
        joint = np.ones(len(chunk))  # of the accepted tokens, as in block verification
        rows = rows[emitted[rows] == accepted[rows] + 1]
        for n in range(played.draft.tokens.shape[1] + 1):
            if n and self._verification == "block":
                joint = self._joint(joint, played, chunk, start, n - 1, p, q)
            for rejected in (True, False):
                these = rows[(accepted[rows] == n) & ((accepted[rows] < lengths[rows]) == rejected)]
                if not len(these):
                    continue
                at = start[these] + n
                law = p[these, at]
                if rejected:
                    law = np.maximum(joint[these, None] * law - q(these, n), 0)
                mass = law.sum(1)
                usable = mass > MIN_RESIDUAL
                law = law[usable] / mass[usable, None]
                drawn = texts[these, at][usable].astype(np.int64)
                name = f"{setting}, {n} accepted" + (" and one rejected" if rejected else ", all")
                self._add(self.following, name, statistics.by_token(law, drawn))
                kind = REJECTED if rejected else "after a full acceptance"
                shared = f"ids by acceptance, {kind}"
                self._add(self.following, shared, statistics.by_index(law, drawn, n))
                rarity = statistics.by_rarity(law, drawn)
                self._add(self.following, f"{setting}, rare and common tokens", rarity)
                order = statistics.by_quantile(statistics.quantiles(law, drawn, self._random))
                self._add(self.following, f"{setting}, {kind} by order of ids", order)

    def _joint(
        self,
        joint: Float[np.ndarray, " rows"],
        played: Round,
        chunk: Int[np.ndarray, " rows"],
        start: Int[np.ndarray, " rows"],
        n: int,
        p: Float[np.ndarray, "rows width vocab"],
        q: Callable[[np.ndarray, int], np.ndarray],
    ) -> Float[np.ndarray, " rows"]:
        """min(P p(x) / q(x), 1) for draft token `n`, of rows that have accepted it."""
        rows = np.flatnonzero(played.accepted[chunk] > n)
        token = played.draft.tokens[chunk[rows], n]
        p_token = p[rows, start[rows] + n, token]
        q_token = q(rows, n)[np.arange(len(rows)), token]
        joint = joint.copy()
        joint[rows] = np.minimum(joint[rows] * p_token / np.maximum(q_token, 1e-30), 1.0)
        return joint

    def _add_draft(
        self,
        setting: str,
        played: Round,
        which: Int[np.ndarray, " batch"],
        begin: Int[np.ndarray, " batch"],
        texts: np.ndarray,
    ) -> None:
        """Adds the valid tokens of a round's draft."""
        draft = played.draft
        running = played.emitted > 0
        if draft.probs is None:
            self._add_deterministic(setting, played, which, begin, texts)
            return
        before = np.full((len(which),), np.nan)
        for i in range(draft.tokens.shape[1]):
            rows = np.flatnonzero(running & (draft.lengths * draft.num_drafts > i))
            if not len(rows):
                return
            q = draft.probs[rows, i].astype(np.float64)
            valid = np.isfinite(q).all(1) & (q >= 0).all(1)
            valid &= np.abs(q.sum(1) - 1) < SUM_TOLERANCE
            self.drafted.comparisons += len(rows) - 1
            self.drafted.compare(
                bool(valid.all()),
                "a reported q is not a distribution: negative, NaN, or of sum not 1.",
            )
            rows, q = rows[valid], q[valid]
            drawn = draft.tokens[rows, i].astype(np.int64)
            self._add(self.drafted, f"{setting}, draft token {i}", statistics.by_token(q, drawn))
            rarity = statistics.by_rarity(q, drawn)
            self._add(self.drafted, f"{setting}, rare and common tokens", rarity)
            at = statistics.quantiles(q, drawn, self._random)
            if i:
                pairs = statistics.by_pair(before[rows], at)
                self._add(self.drafted, f"{setting}, neighbours in a draft", pairs)
            before[rows] = at

    def _add_deterministic(
        self, setting: str, played: Round, which: np.ndarray, begin: np.ndarray, texts: np.ndarray
    ) -> None:
        """Checks that a drafter without q drafts the same tokens after the same text."""
        for row in np.flatnonzero((played.emitted > 0) & (played.draft.lengths > 0)):
            text = texts[row, : played.start[row] - begin[row]]
            context = (setting, int(which[row]), *text.tolist())
            length = played.draft.lengths[row] * played.draft.num_drafts
            draft = tuple(played.draft.tokens[row, :length].tolist())
            self.drafted.compare(
                self._drafted.setdefault(context, draft) == draft,
                "the drafter reports no q, which says that it is deterministic, but drafts "
                "different tokens after the same text.",
            )
