"""What data files mean, and what is refused."""

import json

import pytest

from spec_jax.errors import ConfigError, RequestError
from spec_jax.text.tokenizer import Tokenizer
from spec_jax.training.examples import read_examples
from tests.checkpoints import tiny


def lines(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_prompts_are_continued_questions_answered_and_texts_cut_into_rows(tmp_path, llm):
    file = lines(
        tmp_path / "a.jsonl",
        {"prompt": "the end"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]},
    )
    text = tmp_path / "a.txt"
    text.write_text("a b c d e f g")
    tokenizer = llm.tokenizer
    prompt, question, *rows = read_examples([file, text], tokenizer, 5)
    assert (prompt.prompt, prompt.text) == (tuple(tokenizer.encode("the end")), None)
    asked = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert (question.prompt, question.text) == (tuple(asked), None)
    read = [token for row in rows for token in (*row.prompt, *row.text)]
    assert read == tokenizer.encode("a b c d e f g")[: len(read)]
    assert {len(row.prompt) for row in rows} == {1} and max(len(row.text) for row in rows) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{]", "line 1 is not JSON"),
        ('{"question": 1}', "messages, prompt, text"),
        ('{"prompt": ""}', "give text that is not empty"),
        ('{"prompt": "a", "text": "b"}', "one of the keys"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "there is a user message"),
        ('{"messages": 3}', "there is a user message"),
        ("[1]", "expected an object"),
    ],
)
def test_malformed_data_is_refused_by_file_and_line(tmp_path, llm, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(RequestError, match=message) as error:
        read_examples([path], llm.tokenizer, 8)
    assert "bad.jsonl" in str(error.value)


def test_what_cannot_be_read_is_named(tmp_path, llm):
    with pytest.raises(RequestError, match=r"none\.txt"):
        read_examples([tmp_path / "none.txt"], llm.tokenizer, 8)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(RequestError, match="not UTF-8"):
        read_examples([tmp_path / "latin.txt"], llm.tokenizer, 8)


def test_a_target_without_a_template_invents_nothing():
    from spec_jax.training.examples import prefix_of_questions

    plain = Tokenizer(tiny.byte_tokenizer(), eos_token_ids=(0,))
    with pytest.raises(ConfigError, match="--data"):
        prefix_of_questions(plain)


def test_a_question_begins_where_the_template_puts_the_users_words(llm):
    from spec_jax.training.examples import prefix_of_questions

    prefix = prefix_of_questions(llm.tokenizer)
    whole = llm.tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert whole[: len(prefix)] == prefix
    assert llm.tokenizer.decode(prefix, skip_special_tokens=False) == "<|im_start|>user\n"
