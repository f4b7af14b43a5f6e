"""What contradicts itself in a file of results, as it does on a machine that had other work."""

from collections.abc import Iterator

from spec_jax.benchmarking.summary import Measured, target_seconds

TOLERANCE = 0.05
"""By how much a figure may exceed what is possible, since each of its parts was timed apart."""
MAX_SPREAD = 0.2
"""Range of the repeats over their median; idle machines stay below a tenth."""


def doubts(measured: Measured) -> Iterator[str]:
    """Why a system's figures cannot all be true, in a few words each."""
    median, low, high = measured.tokens_per_second
    if median and (spread := (high - low) / median) > MAX_SPREAD:
        yield f"tokens a second of the repeats differ by {spread:.0%}"
    if measured.system.is_plain or measured.costs is None:
        return
    efficiency = measured.loop_efficiency
    if efficiency is not None and efficiency.median > 1 + TOLERANCE:
        yield f"decoding is {efficiency.median:.2f} times as fast as the cost of its calls allows"
    if (parts := measured.round_seconds) is not None and parts[2] < -TOLERANCE * sum(parts):
        yield f"a round takes {-1000 * parts[2]:.2f} ms less than its calls"
    costs, call = measured.costs, target_seconds(measured.costs).get(1)
    if costs.streaming and call:
        rate = costs.weight_bytes / call / costs.streaming
        if rate > 1 + TOLERANCE:
            yield f"weights are read at {rate:.2f} of the speed of streaming"
