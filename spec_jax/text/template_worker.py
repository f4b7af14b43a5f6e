"""The process that renders chat templates; `spec_jax.text.chat_template` starts it as a script.

It reads one JSON object a line, and answers each with another: `text`, `refused` with the error
of the template, or `failed` with the limit that it exceeded.
"""

import json
import resource
import signal
import sys

MEMORY = 512 << 20
"""Bytes that a template may allocate."""
CHARACTERS = 8_000_000
"""The length of the longest prompt."""


def main() -> None:
    """Answers until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides
    answers, sys.stdout = sys.stdout, sys.stderr
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            (text,), _ = render_jinja_template(
                [question["messages"]],
                chat_template=question["source"],
                **question["options"],
                **question["special_tokens"],
            )
            answer = {"text": str(text)}
            if len(answer["text"]) > CHARACTERS:
                answer = {"failed": f"makes a prompt of more than {CHARACTERS:,} characters"}
        except MemoryError:
            answer = {"failed": f"takes more than {MEMORY >> 20} MiB of memory"}
        except Exception as error:  # anything that Jinja or Python raises
            answer = {"refused": str(error) or type(error).__name__}
        print(json.dumps(answer), file=answers, flush=True)


def _limit_memory() -> None:
    """Limits the memory on top of the libraries', where the system can."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    except (OSError, ValueError):
        pass


if __name__ == "__main__":
    main()
