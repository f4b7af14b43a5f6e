"""What the answers of all endpoints have in common: ids, usage, figures of speculation."""

import secrets
from typing import Any

from spec_jax.outputs import RequestOutput, SpeculativeMetrics


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}-{secrets.token_hex(16)}"


class UsageCounter:
    """The token counts of an answer, while its completions come in.

    Args:
      has_prediction: whether drafted tokens are reported as predicted ones.
    """

    def __init__(self, *, has_prediction: bool = False) -> None:
        self._has_prediction = has_prediction
        self._prompts: dict[int, tuple[int, int]] = {}
        self.completion = self.reasoning = 0
        self._drafted = self._accepted = 0

    def add(self, prompt: int, output: RequestOutput) -> None:
        """Counts a finished completion of a prompt."""
        cached = max(output.num_cached_tokens, self._prompts.get(prompt, (0, 0))[1])
        self._prompts[prompt] = len(output.prompt_token_ids), cached
        self.completion += len(output.token_ids)
        metrics = output.outputs[0].metrics
        self._drafted += metrics.draft_tokens
        self._accepted += metrics.accepted_tokens

    def as_dict(self) -> dict[str, Any]:
        """The field `usage`."""
        prompt = sum(count for count, _ in self._prompts.values())
        details = {"reasoning_tokens": self.reasoning}
        if self._has_prediction:
            rejected = self._drafted - self._accepted
            details |= {
                "accepted_prediction_tokens": self._accepted,
                "rejected_prediction_tokens": rejected,
            }
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion,
            "total_tokens": prompt + self.completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(cached for _, cached in self._prompts.values())
            },
            "completion_tokens_details": details,
        }


def speculation(metrics: SpeculativeMetrics) -> dict[str, Any]:
    """How a completion was drafted; names as in vLLM."""
    at_least = (metrics.rounds, *metrics.accepted_per_position)
    histogram = [more - less for more, less in zip(at_least, (*at_least[1:], 0), strict=True)]
    return {
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "draft_acceptance_rate": metrics.draft_acceptance_rate,
        "acceptance_histogram": histogram,
        "num_spec_steps": metrics.rounds,
        "num_accepted_draft_tokens": metrics.accepted_tokens,
        "num_draft_tokens": metrics.draft_tokens,
        "num_spec_tokens": len(metrics.accepted_per_position),
    }
