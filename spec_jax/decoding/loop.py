"""The loop: propose, score, verify, commit."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

from spec_jax.config import SCORINGS, VERIFICATIONS
from spec_jax.control import at_width
from spec_jax.decoding.draft_length import DraftLengthPolicy, DraftOutcome, scoring_widths
from spec_jax.decoding.rows import write_rows
from spec_jax.decoding.score import Scored, hidden_states, score
from spec_jax.decoding.state import ERROR, LENGTH, RUNNING, STOP, DecodeState
from spec_jax.decoding.verification import Verification
from spec_jax.decoding.verify import draw_target_tokens, split_keys, verify, verify_equal
from spec_jax.drafters.base import Committed, Context, Draft, Drafter
from spec_jax.models.model import Model
from spec_jax.sampling.draw import argmax
from spec_jax.sampling.keys import child_key
from spec_jax.sampling.parameters import BatchSampling


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How rounds are drafted and verified; static under jit.

    Attributes:
      draft_length: how many tokens to draft.
      verification: which of them to accept.
      scoring: how the target is called.
      consistent: whether every round scores K + 1 tokens of a row, however few are drafted.
    """

    draft_length: DraftLengthPolicy
    verification: str = "coupled"
    scoring: str = "block"
    consistent: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("verification", VERIFICATIONS), ("scoring", SCORINGS)):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} is {value!r}; take one of {', '.join(choices)}")


def decode(
    target: Model,
    drafter: Drafter,
    strategy: Strategy,
    state: DecodeState,
    sampling: BatchSampling,
    max_rounds: Int[Array, ""],
    min_running: Int[Array, ""] | int = 1,
) -> DecodeState:
    """Decodes while at least `min_running` rows run, for at most `max_rounds` rounds (dynamic).

    `strategy` is static. Donate `state`: the caches are updated in place.
    """

    def has_more(carry: tuple[Array, DecodeState]) -> Array:
        rounds, state = carry
        running = (state.finish == RUNNING).sum(dtype=jnp.int32)
        return (rounds < max_rounds) & (running >= min_running)

    def one_round(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        rounds, state = carry
        return rounds + 1, decode_round(target, drafter, strategy, state, sampling)

    return jax.lax.while_loop(has_more, one_round, (jnp.int32(0), state))[1]


def decode_round(
    target: Model, drafter: Drafter, strategy: Strategy, state: DecodeState, sampling: BatchSampling
) -> DecodeState:
    """One round: every running row emits between 1 and K + 1 tokens."""
    draft, state = propose(drafter, strategy, state, sampling)
    return finish_round(target, drafter, strategy, state, draft, sampling)


def finish_round(
    target: Model,
    drafter: Drafter,
    strategy: Strategy,
    state: DecodeState,
    draft: Draft,
    sampling: BatchSampling,
    allowed: UInt32[Array, "batch positions words"] | None = None,
) -> DecodeState:
    """Scores, verifies and commits a draft, at the smallest compiled width that holds it.

    `allowed` are packed sets of the tokens that a grammar allows at each query position.
    """
    policy = strategy.draft_length
    scored_drafts = jnp.maximum(draft.lengths, policy.min_width(state.draft_length))
    computed = num_tokens = None
    if _skips_padding(target, strategy, draft):
        num_tokens = jnp.where(state.finish == RUNNING, scored_drafts + 1, 0)
        computed, cache = hidden_states(target, state, draft, num_tokens, drafter.feature_layers)
        state = dataclasses.replace(state, cache=cache)

    def finish(width: int, state: DecodeState) -> DecodeState:
        short = draft.first(width)
        masks = None if allowed is None else allowed[:, : 1 + width * draft.num_drafts]
        scored = score(
            target,
            state,
            short,
            sampling,
            strategy.scoring,
            masks,
            drafter.feature_layers,
            computed,
        )
        if drafter.needs_likeliest:
            scored = scored.with_likeliest(target.placement, num_tokens)
        tokens = scored.greedy_tokens
        if strategy.verification == "coupled" and scored.p is not None:
            keys = _token_keys(state, short.lookahead + 1)
            tokens = draw_target_tokens(
                scored.p, keys, draft.num_drafts, target.placement, num_tokens
            )
        if tokens is not None:
            verified = verify_equal(tokens, short)
        else:
            assert scored.p is not None
            _, keys = _round_keys(state.keys, state.lengths)
            verified = verify(strategy.verification, scored.p, short, keys, target.placement)
        return commit(drafter, strategy.draft_length, state, short, scored, verified, sampling)

    widths = scoring_widths(policy, drafter.fixed_length, strategy.consistent)
    if computed is not None and _only_compares(strategy, state, sampling, allowed):
        widths = (draft.lookahead,)
    return at_width(widths, scored_drafts.max(), finish, state)


def _skips_padding(target: Model, strategy: Strategy, draft: Draft) -> bool:
    """Whether the tokens after a row's draft are not scored."""
    is_block = strategy.scoring == "block" and draft.num_drafts == 1 and draft.partial is None
    return target.skips_padding and is_block and not strategy.consistent


def _only_compares(
    strategy: Strategy,
    state: DecodeState,
    sampling: BatchSampling,
    allowed: UInt32[Array, "batch positions words"] | None,
) -> bool:
    """Whether drafts are only compared with tokens of the target, which native code finds.

    Other steps are as wide as the vocabulary, and XLA would take them at all K + 1 places.
    """
    compares = strategy.verification == "coupled" or not sampling.features.random
    return compares and not sampling.features.history and allowed is None and state.logprobs is None


@jax.named_scope("propose")
def propose(
    drafter: Drafter, strategy: Strategy, state: DecodeState, sampling: BatchSampling
) -> tuple[Draft, DecodeState]:
    """Drafts as much as `limits` allows."""
    policy = strategy.draft_length
    max_drafted, threshold = limits(policy, state)
    least_survival = None
    if drafter.has_confidence:
        confident = policy.confident_limits(state.draft_length, state.finish == RUNNING)
        if confident is not None:
            # A sampled token is accepted more often than its probability says.
            is_greedy = sampling.temperature == 0
            max_drafted = jnp.where(is_greedy, _within(confident[0], state), max_drafted)
            least_survival = jnp.where(is_greedy, confident[1], 0.0)
    keys, _ = _round_keys(state.keys, state.lengths)
    is_coupled = strategy.verification == "coupled"
    context = Context(
        tokens=state.tokens,
        lengths=state.lengths,
        prompt_lengths=state.prompt_lengths,
        keys=keys,
        target_keys=_token_keys(state, drafter.lookahead) if is_coupled else None,
        sampling=sampling,
        limits=max_drafted,
        threshold=threshold,
        least_survival=least_survival,
        cache=state.cache,
        fixed_length=not policy.varies,
    )
    draft, drafter_state = drafter.propose(state.drafter, context)
    draft = dataclasses.replace(draft, lengths=jnp.clip(draft.lengths, 0, max_drafted))
    cache = state.cache
    if draft.partial is not None:  # from here on only the state holds the cache
        cache = draft.partial.cache
        draft = dataclasses.replace(draft, partial=dataclasses.replace(draft.partial, cache=None))
    return draft, dataclasses.replace(state, drafter=drafter_state, cache=cache)


def limits(
    policy: DraftLengthPolicy, state: DecodeState
) -> tuple[Int[Array, " batch"], Float[Array, " batch"] | None]:
    """How many tokens each row may draft at most, and the confidence below which it stops.

    It is the limit of the policy, but at most one less than the row can still emit.
    """
    max_drafted = policy.limits(state.draft_length, state.finish == RUNNING)
    threshold = policy.threshold(state.draft_length, state.lengths.shape[0])
    return _within(max_drafted, state), threshold


def _within(limits: Int[Array, " batch"], state: DecodeState) -> Int[Array, " batch"]:
    """The limits of rows that may draft, with room for the token that follows a draft."""
    room = jnp.maximum(state.max_lengths - state.lengths - 1, 0)
    may_draft = (state.finish == RUNNING) & state.may_draft
    return jnp.where(may_draft, jnp.minimum(limits, room), 0)


def _round_keys(
    keys: UInt32[Array, "*lead words"], lengths: Int[Array, "*lead"]
) -> tuple[Key[Array, "*lead"], Key[Array, "*lead"]]:
    """Fresh keys for drafting and for verification.

    They depend on the row's key and length alone, so neither its neighbours nor the number of
    rounds per call can change its tokens.
    """
    keys_of_rows = jax.random.wrap_key_data(keys, impl="threefry2x32")
    keys_here = child_key(keys_of_rows, lengths)
    return child_key(keys_here, 0), child_key(keys_here, 1)


def _token_keys(state: DecodeState, count: int) -> Key[Array, "batch count"]:
    """The keys with which plain decoding draws each row's next tokens, one in a round."""
    shape = len(state.lengths), count
    lengths = state.lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    keys = jnp.broadcast_to(state.keys[:, None], (*shape, state.keys.shape[1]))
    _, keys_of_rounds = _round_keys(keys, lengths)
    return split_keys(keys_of_rounds)[1]


@jax.named_scope("commit")
def commit(
    drafter: Drafter,
    policy: DraftLengthPolicy,
    state: DecodeState,
    draft: Draft,
    scored: Scored,
    verified: Verification,
    sampling: BatchSampling,
) -> DecodeState:
    """Writes the emitted tokens, finds stops inside them, and rolls both caches back.

    Finished rows emit nothing. A row stops right after the first stop token among its emitted
    tokens, like a token-by-token decoder; a stop token at the last allowed position counts as a
    stop. A row whose next token has no distribution keeps its accepted tokens and ends.
    """
    width = draft.lookahead
    positions = jnp.arange(width + 1, dtype=jnp.int32)[None]
    path = draft.path(verified.draft_index)
    draft_ids = jnp.pad(jnp.take_along_axis(draft.tokens, path, axis=1), ((0, 0), (0, 1)))
    new_ids = jnp.where(positions < verified.accepted[:, None], draft_ids, verified.token[:, None])
    scored = scored.along(draft, path, state.lengths)

    num_new = verified.accepted + verified.valid.astype(jnp.int32)
    is_stop = (new_ids[..., None] == sampling.stop_token_ids[:, None]).any(-1)
    is_stop = is_stop & (positions < num_new[:, None])
    stops = is_stop.any(-1)
    running = state.finish == RUNNING
    emitted = jnp.where(stops, argmax(is_stop) + 1, num_new)
    emitted = jnp.where(running, emitted, 0)
    tokens, lengths = write_rows(state.tokens, new_ids, state.lengths), state.lengths + emitted

    finish = jnp.where(lengths >= state.max_lengths, LENGTH, RUNNING)
    finish = jnp.where(verified.valid, finish, ERROR)
    finish = jnp.where(stops, STOP, finish)
    finish = jnp.where(running, finish, state.finish)

    # Draft tokens past a stop count neither as drafted nor as accepted.
    drafted = jnp.where(stops, jnp.minimum(draft.lengths, emitted), draft.lengths)
    drafted = jnp.where(running, drafted, 0)
    accepted = jnp.minimum(jnp.where(running, verified.accepted, 0), emitted)
    outcome = DraftOutcome.of(draft, path, drafted, accepted)
    counted = drafted if policy.counts_rejected else accepted
    committed = Committed(tokens, state.lengths, lengths, verified.draft_index, scored.features)
    if scored.likeliest is not None:
        last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
        is_scored = running[:, None] & (positions <= draft.lengths[:, None])
        committed = dataclasses.replace(
            committed,
            scored_tokens=jnp.concatenate([last, draft_ids[:, :-1]], axis=1),
            likeliest=jnp.where(is_scored, scored.likeliest, -1),
        )
    logprobs = state.logprobs
    if logprobs is not None:
        logprobs = logprobs.add(scored.logits, tokens, state.lengths)
    return dataclasses.replace(
        state,
        tokens=tokens,
        lengths=lengths,
        finish=finish.astype(jnp.int32),
        cache=scored.cache.commit(lengths - 1),
        drafter=drafter.commit(state.drafter, committed),
        draft_length=policy.update(state.draft_length, outcome),
        counters=state.counters.add(running, counted, accepted, emitted, state.lengths, width),
        logprobs=logprobs,
    )
