"""Templates are programs of strangers: what they may do, and what stops them."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from spec_jax import ConfigError, RequestError
from spec_jax.text import chat_template
from spec_jax.text.chat_template import ChatTemplate
from spec_jax.text.tokenizer import Tokenizer
from tests.checkpoints.tiny import TEMPLATE

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hé\n<b>"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = [
    TEMPLATE,
    "{{ bos_token }}{% for m in messages %}\n  {% if loop.first %}[{{ m['content'] | trim }}]"
    "{% continue %}{% endif %}\n{{ m | tojson }}{% endfor %}{{ eos_token }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{% generation %}x{% endgeneration %}{{ strftime_now('%Y') }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_the_prompt_is_that_of_transformers(source):
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(BPE()), **TOKENS)
    expected = theirs.apply_chat_template(
        MESSAGES, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(source, TOKENS)(MESSAGES) == expected


VARIABLES = (
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m['content'] }}|{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}{% endfor %}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_tools_and_variables_reach_the_template_as_in_transformers():
    template = ChatTemplate(VARIABLES, TOKENS)
    tokenizer = Tokenizer(tokenizers.Tokenizer(BPE()), eos_token_ids=[0], chat_template=template)
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(BPE()), **TOKENS)
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    messages = [*MESSAGES, called, {"role": "tool", "content": "3"}]
    expected = theirs.apply_chat_template(
        messages, chat_template=VARIABLES, tokenize=False, tools=TOOLS, enable_thinking=False
    )
    ours = tokenizer.apply_chat_template(
        messages,
        tools=TOOLS,
        chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
    )
    assert ours == expected and "<think>" in ours and "add" in ours
    assert "<think>" not in tokenizer.apply_chat_template(messages)
    assert tokenizer.apply_chat_template(messages, tokenize=False)
    with pytest.raises(ConfigError, match="tokenize is true; encode_chat gives"):
        tokenizer.apply_chat_template(messages, tokenize=True)
    for name in ("tools", "messages", "bos_token"):
        with pytest.raises(ConfigError, match=f"sets {name}, which is set already"):
            tokenizer.apply_chat_template(messages, chat_template_kwargs={name: 1})


def test_parts_of_a_message_are_its_lines():
    template = ChatTemplate(VARIABLES, TOKENS)
    tokenizer = Tokenizer(tokenizers.Tokenizer(BPE()), eos_token_ids=[0], chat_template=template)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert tokenizer.apply_chat_template([{"role": "user", "content": parts}]) == "one\ntwo|"
    for part in ({"type": "image_url", "image_url": "x"}, {"type": "text", "text": 3}, "one"):
        with pytest.raises(RequestError, match="a part of a user message's content is"):
            tokenizer.apply_chat_template([{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('only users') }}", "refuses these messages: only users"),
        ("{% for", "refuses these messages: "),
        ("{{ messages.x.y }}", "refuses these messages: "),
        ("{{ 1 / 0 }}", "refuses these messages: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "refuses these messages: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (
            "{% set x = range(9999) | list %}" + "{% for a in x %}" * 4 + "{% endfor %}" * 4,
            "took more than 1 seconds",
        ),
        ("{{ 'x' * 10 ** 10 }}", "takes more than 512 MiB of memory"),
        ("{{ messages[0].content | center(10 ** 10) }}", "takes more than 512 MiB of memory"),
        ("{{ 'x' * 9000000 }}", "makes a prompt of more than 8,000,000 characters"),
    ],
)
def test_what_a_template_may_not_do(source, said, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 1.0)
    begin = time.monotonic()
    with pytest.raises(RequestError, match=said):
        ChatTemplate(source, TOKENS)(MESSAGES)
    assert time.monotonic() - begin < 5
    assert ChatTemplate("{{ bos_token }}", TOKENS)(MESSAGES) == "<s>"


def test_several_threads_ask_one_process():
    made = ChatTemplate("{{ messages[0].content }}", {})
    texts = [str(i) * 1000 for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: made([{"role": "user", "content": text}]), texts))
    assert found == texts


def test_a_process_that_was_killed_is_started_again():
    made = ChatTemplate("{{ messages[0].content }}", {})
    assert made(MESSAGES) == "Be short."
    os.kill(chat_template.renderer.process.pid, 9)
    time.sleep(0.2)
    assert made(MESSAGES) == "Be short."


def test_it_can_be_started_ahead_of_a_question():
    made = ChatTemplate("{{ messages[0].content }}", {})
    chat_template.renderer.stop()
    begin = time.monotonic()
    chat_template.renderer.start()
    assert time.monotonic() - begin < 0.2  # it takes longer to be ready
    process = chat_template.renderer.process
    assert made(MESSAGES) == "Be short." and chat_template.renderer.process is process


def test_a_long_conversation():
    made = ChatTemplate("{{ messages[0].content }}", {})
    text = "é" * 3_000_000
    assert made([{"role": "user", "content": text}]) == text
