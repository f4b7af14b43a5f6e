"""Results made by hand, whose figures one can work out in one's head."""

from spec_jax.benchmarking.results import (
    BenchRequest,
    BenchRun,
    Costs,
    Header,
    PromptsOf,
    Results,
    Setting,
    Step,
    System,
)

GREEDY, SAMPLED = Setting(), Setting(temperature=0.8, top_p=0.9)
PLAIN = System(name="plain")


def drafting(k: int) -> System:
    return System(name=f"draft_model, K = {k}", method="draft_model", num_speculative_tokens=k)


SYSTEMS = (
    PLAIN,
    drafting(1),
    drafting(3),
    System(name="transformers, plain", library="transformers"),
)


def header(**changes) -> Header:
    values = {
        "created": "2026-01-01T00:00:00+00:00",
        "command": "spec-jax bench --target <model> & more",
        "versions": {"jax": "1"},
        "machine": "a machine",
        "devices": {"cpu": 1},
        "layout": "one device",
        "target": "<model>",
        "draft": "small",
        "dtype": "float32",
        "quantization": "none",
        "options": {},
        "seed": 0,
        "max_tokens": 8,
        "ignore_eos": False,
        "repeats": 2,
        "settings": (GREEDY, SAMPLED),
        "batch_sizes": (1, 4),
        "systems": SYSTEMS,
        "prompts": (PromptsOf(name="chat", count=2, digest="d"),),
    }
    return Header(**values | changes)


def request(prompt: int, seconds: float, k: int = 0, kept: int = 0, **changes) -> BenchRequest:
    """8 tokens; each round keeps `kept` of K drafted tokens, and reading the prompt is free."""
    rounds = 8 // (1 + kept)
    values = {
        "prompt": prompt,
        "category": "ab"[prompt],
        "prompt_tokens": 4,
        "tokens": 8,
        "finish_reason": "length",
        "digest": "d",
        "rounds": rounds,
        "draft_tokens": k * rounds,
        "accepted_tokens": kept * rounds,
        "accepted_per_position": tuple(rounds if i < kept else 0 for i in range(k)),
        "first_token_seconds": seconds / 8,
        "seconds": seconds,
        "decode_seconds": seconds,
    }
    return BenchRequest(**values | changes)


def run(system: System, repeat: int, *seconds: float, kept=0, setting=GREEDY, batch=1) -> BenchRun:
    k = system.num_speculative_tokens
    return BenchRun(
        prompts="chat",
        setting=setting,
        batch_size=batch,
        system=system.name,
        repeat=repeat,
        seconds=sum(seconds) / batch,
        requests=tuple(request(i, each, k, kept) for i, each in enumerate(seconds)),
    )


def costs(batch: int = 1) -> Costs:
    """v(2) = 1.5, v(4) = 2, c = 0.25."""
    return Costs(
        batch_size=batch,
        weight_bytes=4_000_000_000,
        streaming=8e9,
        steps=(
            Step(name="target", width=1, seconds=(1.0, 1.0)),
            Step(name="target", width=2, seconds=(1.5, 1.5)),
            Step(name="target", width=4, seconds=(2.0, 2.0)),
            Step(name="draft_model", width=1, seconds=(0.25, 0.25)),
        ),
    )


def results(scale: float = 1.0) -> Results:
    """Greedy and sampled, alone and in batches; `scale` slows drafting down."""
    lines: list = [costs()]
    for setting in (GREEDY, SAMPLED):
        for batch in (1, 4):
            for repeat in range(2):
                slower = 1 + repeat  # a machine that is busy in the second repeat
                for system, seconds, kept in (
                    (PLAIN, 8.0, 0),
                    (drafting(1), 4.0 * scale, 1),
                    (drafting(3), 5.0 * scale, 1),
                ):
                    times = (seconds * slower, 2 * seconds * slower)
                    lines.append(
                        run(system, repeat, *times, kept=kept, setting=setting, batch=batch)
                    )
    return Results(header(), lines)
