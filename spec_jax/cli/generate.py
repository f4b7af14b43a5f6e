"""`spec-jax generate`: completes prompts."""

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from spec_jax import distributed
from spec_jax.cli.decoding_options import GenerateOptions
from spec_jax.cli.interrupts import INTERRUPTED, acknowledge
from spec_jax.cli.loading import load, prompts_of
from spec_jax.cli.prompts import PromptText, keys_of, title_of
from spec_jax.cli.results_file import ResultsFile, refuse_existing
from spec_jax.cli.screen import Screen
from spec_jax.cli.statistics import Run, same_tokens, table
from spec_jax.llm import LLM, Prompt
from spec_jax.outputs import RequestOutput, StreamChunk

PLAIN = "this was plain decoding; --method prompt_lookup or --draft REF makes it speculative"
HEADING_WIDTH = 60
"""Characters of a prompt that the heading above its result shows."""


def run(options: GenerateOptions, screen: Screen, texts: list[PromptText]) -> int:
    """Completes prompts and prints the results; returns the exit code."""
    if options.output is not None:
        refuse_existing(options.output, options.resume)
    llm = load(options, screen, chat=options.chat)
    prompts = prompts_of(llm, options, texts)
    if options.output is not None:
        return _write(llm, prompts, texts, options, screen)
    method, greedy = options.speculative.method, options.sampling.temperature == 0
    compare = options.compare and method != "none"
    if compare:
        _warm_up(llm, prompts, options)
    outputs, records = [], []
    for output in _decode(llm, prompts, options, screen, None if options.json else texts):
        if options.json:
            index = len(outputs)
            records.append({"index": index, **keys_of(texts[index]), **output.as_dict()})
            if not compare:
                screen.record(records.pop())
        outputs.append(output)
    ours, plain = Run(method, outputs, llm), None
    if compare:
        screen.progress("decoding plainly, to compare")
        plainly = llm.with_speculation(options.speculative.plain)  # with the same weights
        _warm_up(plainly, prompts, options)
        plain = Run("plain", list(_decode(plainly, prompts, options, screen)), plainly)
        same = same_tokens(ours, plain) if greedy else [None] * len(prompts)
        for record, other, identical in zip(records, plain.outputs, same, strict=False):
            screen.record(record | {"plain": other.metrics.as_dict(), "identical": identical})
    if not options.json:
        screen.note("")
        screen.note(table(ours, plain, greedy=greedy))
    if method == "none" and (options.compare or not options.json):
        screen.note(f"{'nothing to compare: ' if options.compare else ''}{PLAIN}")
    return screen.errors_of(outputs)


def _write(
    llm: LLM,
    prompts: list[Prompt],
    texts: Sequence[PromptText],
    options: GenerateOptions,
    screen: Screen,
) -> int:
    """Writes the results that the file does not hold yet; process 0 does, of several."""
    outputs: list[RequestOutput] = []
    interrupted = False
    with contextlib.ExitStack() as stack:
        file: ResultsFile | None = None

        def open_file() -> list[int]:
            nonlocal file
            file = ResultsFile(options, [keys_of(each) for each in texts], stack)
            return sorted(file.done)

        done = set(distributed.from_first(open_file))
        left = [i for i in range(len(prompts)) if i not in done]
        try:
            for chunk in llm.stream([prompts[i] for i in left], options.sampling) if left else ():
                count = len(done) + len(outputs)
                screen.progress(f"decoding, {count} of {len(prompts)} prompts done")
                if chunk.output is not None:
                    outputs.append(chunk.output)
                    if file is not None:
                        file.add(left[chunk.index], chunk.output.as_dict())
        except KeyboardInterrupt:
            acknowledge()
            interrupted = True
    screen.settle()
    if outputs:
        screen.note(table(Run(options.speculative.method, outputs, llm), None))
    screen.note(f"{len(done) + len(outputs)} of {len(prompts)} results in {options.output}")
    if interrupted:
        screen.note("interrupted; the same command with --resume continues")
        return INTERRUPTED
    return screen.errors_of(outputs)


def _decode(
    llm: LLM,
    prompts: list[Prompt],
    options: GenerateOptions,
    screen: Screen,
    texts: Sequence[PromptText] | None = None,
) -> Iterator[RequestOutput]:
    """Yields the results in order; prints the text of each as it comes if there are prompts."""
    last = -1
    for chunk in _in_order(llm.stream(prompts, options.sampling)):
        if texts is None:
            screen.progress(f"decoding, {chunk.index} of {len(prompts)} prompts done")
        else:
            if len(texts) > 1 and chunk.index != last:
                line = " ".join(title_of(texts[chunk.index]).split())
                if len(line) > HEADING_WIDTH:
                    line = line[: HEADING_WIDTH - 1] + "\u2026"
                screen.heading(f"==> prompt {chunk.index}: {line} <==")
            screen.write(chunk.text)
            last = chunk.index
        if chunk.output is not None:
            if texts is not None:
                screen.end_line()
            yield chunk.output


def _in_order(chunks: Iterable[StreamChunk]) -> Iterator[StreamChunk]:
    """Holds back the chunks of a prompt until all prompts before it have finished."""
    held: dict[int, deque[StreamChunk]] = defaultdict(deque)
    current = 0
    for chunk in chunks:
        held[chunk.index].append(chunk)
        while held[current]:
            ready = held[current].popleft()
            yield ready
            if ready.output is not None:
                del held[current]
                current += 1


def _warm_up(llm: LLM, prompts: list[Prompt], options: GenerateOptions) -> None:
    """Compiles and runs the first rounds, so that neither run is measured cold."""
    for _ in llm.stream(prompts, options.sampling):
        break
