"""Reasoning and calls of tools are found alike, wherever the text is cut."""

import json
import random

import pytest

from spec_jax.serving.parsing import AnswerParser, reasons, tool_format

NAMES = ["weather", "add"]
CALL = '{"name": "weather", "arguments": {"city": "Köln", "note": "a } and a </tool_call"}}'
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": null}]}}'


def parsed(pieces, **options):
    """(text, reasoning, calls) of an answer that comes in pieces."""
    parser = AnswerParser(**options)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    calls = [each.tool_call for each in deltas if each.tool_call]
    assert len({each.id for each in calls}) == len(calls)
    return (
        "".join(each.content for each in deltas),
        "".join(each.reasoning for each in deltas),
        [(each.name, json.loads(each.arguments)) for each in calls],
    )


WEATHER = ("weather", {"city": "Köln", "note": "a } and a </tool_call"})
SUM = ("add", {"a": 1, "b": [2, {"c": None}]})
HERMES = {
    f"<tool_call>\n{CALL}\n</tool_call>": ("", "", [WEATHER]),
    f"Sure.\n\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{ADD}\n</tool_call>": (
        *("Sure.", "", [WEATHER, SUM]),
    ),
    f"<tool_call>{CALL}</tool_call>\nDone.": ("Done.", "", [WEATHER]),
    f"<tool_call>\n{CALL}": ("", "", [WEATHER]),  # ended by a stop token in place of the tag
    "a < b, and <tool_ is no tag\n": ("a < b, and <tool_ is no tag\n", "", []),
    "<tool_call>\n{broken\n</tool_call>": ("<tool_call>\n{broken\n</tool_call>", "", []),
    '<tool_call>{"name": "other", "arguments": {}}</tool_call>': (
        *('<tool_call>{"name": "other", "arguments": {}}</tool_call>', "", []),
    ),
}
LLAMA = {
    '{"name": "add", "parameters": {"a": 1}}': ("", "", [("add", {"a": 1})]),
    '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "add", "parameters": {"x": "};"}}': (
        *("", "", [("add", {}), ("add", {"x": "};"})]),
    ),
    '{"answer": 4}': ('{"answer": 4}', "", []),
    "<|python_tag is text": ("<|python_tag is text", "", []),
    "Four. {": ("Four. {", "", []),
}
MISTRAL = {
    f"[TOOL_CALLS] [{CALL}, {ADD}]": ("", "", [WEATHER, SUM]),
    '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"city": "B"}': (
        *("", "", [("add", {"a": 1}), ("weather", {"city": "B"})]),
    ),
    'I look.[TOOL_CALLS]add{"a": 2}': ("I look.", "", [("add", {"a": 2})]),
    "[TOOL_CALLS] nonsense": ("[TOOL_CALLS] nonsense", "", []),
    "[TOOL_ is text": ("[TOOL_ is text", "", []),
}
FORCED = {f"[{CALL}]": ("", "", [WEATHER]), "[": ("[", "", [])}
CASES = [
    (form, text, expected)
    for form, cases in {
        "hermes": HERMES,
        "llama3": LLAMA,
        "mistral": MISTRAL,
        "json": FORCED,
    }.items()
    for text, expected in cases.items()
]


def cuts(text, seed):
    """The text in pieces: whole, by characters, and cut at random places."""
    yield [text]
    yield [*text]
    rng = random.Random(seed)
    for _ in range(30):
        places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 6)))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_calls_are_found_wherever_the_text_is_cut(form, text, expected):
    for pieces in cuts(text, 1):
        assert parsed(pieces, tools=form, names=NAMES) == expected, pieces


THOUGHTS = {
    "<think>\nIs 2 < 3? Yes.\n</think>\n\nYes.": (False, ("Yes.", "Is 2 < 3? Yes.")),
    "Is it? </thin is no tag.\n</think>\n\nYes.\n": (True, ("Yes.\n", "Is it? </thin is no tag.")),
    "Yes, <think> is a tag.": (False, ("Yes, <think> is a tag.", "")),
    "  <think>a</think>b</think>c": (False, ("b</think>c", "a")),
    "<think>cut off": (False, ("", "cut off")),
    "<thin": (False, ("<thin", "")),
    "\n\nYes.": (False, ("\n\nYes.", "")),
}


@pytest.mark.parametrize(("text", "expected"), THOUGHTS.items())
def test_reasoning_is_divided_from_the_answer_wherever_it_is_cut(text, expected):
    within, (content, reasoning) = expected
    for pieces in cuts(text, 2):
        options = {"reasoning": True, "within": within}
        assert parsed(pieces, **options) == (content, reasoning, []), pieces
        # Calls in the reasoning are thoughts; calls after it are calls.
        more = [*pieces, f"<tool_call>{ADD}</tool_call>"]
        after = parsed(more, **options, tools="hermes", names=NAMES)
        assert (len(after[2]) == 1) == (
            "</think>" in text or not text.lstrip().startswith("<think>")
        )


def test_the_chat_template_tells_the_format():
    assert tool_format("{{ '<tool_call>' }}") == "hermes"
    assert tool_format("{% if '[TOOL_CALLS]' %}") == "mistral"
    assert tool_format("Environment: ipython") == "llama3"
    assert tool_format("plain") is tool_format(None) is None
    assert reasons("... </think> ...") and not reasons(None)


PIECES = [
    "a",
    " the",
    "\n",
    "}",
    '"',
    "{",
    "</",
    "<",
    "[",
    "]",
    ";",
    "é",
    "🙂",
    "tool_call>",
    "\\",
    "ARGS",
]


def random_calls(rng):
    """Calls whose arguments hold what formats are made of."""
    text = lambda: "".join(rng.choices(PIECES, k=rng.randint(0, 8)))  # noqa: E731
    values = (
        text,
        lambda: rng.randint(-9, 9),
        lambda: [text(), None],
        lambda: {"x": {"y": text()}},
    )
    return [
        (rng.choice(NAMES), {f"k{i}": rng.choice(values)() for i in range(rng.randint(0, 4))})
        for _ in range(rng.randint(1, 3))
    ]


def written(form, calls, prose, rng):
    """An answer with calls, as models of a format write it."""
    key = "parameters" if form == "llama3" else "arguments"
    dump = lambda value: json.dumps(value, ensure_ascii=rng.random() < 0.5)  # noqa: E731
    objects = [dump({"name": name, key: arguments}) for name, arguments in calls]
    if form == "hermes":
        return prose + "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if form == "llama3":
        return rng.choice(["", "<|python_tag|>"]) + "; ".join(objects)
    if rng.random() < 0.5:
        return f"{prose}[TOOL_CALLS] [{', '.join(objects)}]"
    return prose + "".join(f"[TOOL_CALLS]{name}[ARGS]{dump(each)}" for name, each in calls)


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
def test_two_hundred_answers_cut_at_every_token(form, plain):
    rng, tokenizer = random.Random(7), plain.tokenizer
    for _ in range(200):
        calls = random_calls(rng)
        if form != "llama3" and any("tool_call>" in json.dumps(each) for each in calls):
            # A tag within an argument ends a call, in every server of this format.
            calls = [(name, {"k": 1}) for name, _ in calls]
        prose = "" if form == "llama3" else rng.choice(["", "I look. ", "Is 2 < 3?\n\n"])
        text = written(form, calls, prose, rng)
        stream = tokenizer.stream(skip_special_tokens=False)
        tokens = [stream.push([each]) for each in tokenizer.encode(text, False)]
        tokens.append(text[len("".join(tokens)) :])
        expected = prose.rstrip(), "", calls
        assert parsed([text], tools=form, names=NAMES) == expected, text
        assert parsed(tokens, tools=form, names=NAMES) == expected, text
        for at in range(len(tokens)):
            halves = "".join(tokens[:at]), "".join(tokens[at:])
            assert parsed(halves, tools=form, names=NAMES) == expected, halves
