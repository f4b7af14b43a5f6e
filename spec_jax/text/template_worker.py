"""The process that renders chat templates; `spec_jax.text.chat_template` starts it as a script.

It reads a JSON object a line, and answers each with one: `text`, `refused` with what the template
raised, or `failed` with the limit that it ran into.
"""

import json
import resource
import signal
import sys

MEMORY = 512 << 20
"""Bytes that a template may take."""
CHARACTERS = 8_000_000
"""The longest prompt that a template may make."""


def main() -> None:
    """Answers until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it decides
    answers, sys.stdout = sys.stdout, sys.stderr
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            (text,), _ = render_jinja_template(
                [asked["messages"]],
                chat_template=asked["source"],
                **asked["options"],
                **asked["special_tokens"],
            )
            answer = {"text": str(text)}
            if len(answer["text"]) > CHARACTERS:
                answer = {"failed": f"makes a prompt of more than {CHARACTERS:,} characters"}
        except MemoryError:
            answer = {"failed": f"takes more than {MEMORY >> 20} MiB of memory"}
        except Exception as error:  # whatever a template's text makes Jinja or Python raise
            answer = {"refused": str(error) or type(error).__name__}
        print(json.dumps(answer), file=answers, flush=True)


def _limit_memory() -> None:
    """Limits what comes on top of the libraries, where the system can."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    except (OSError, ValueError):
        pass


if __name__ == "__main__":
    main()
