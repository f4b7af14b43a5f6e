"""The commands there are, and what bare `spec-jax` prints. Imports nothing: it comes at once."""

COMMANDS = {
    "generate": "complete prompts",
    "chat": "hold a conversation",
    "serve": "answer over HTTP, like the OpenAI API",
    "transcribe": "write down the words of audio files",
    "audit": "test that nothing is lost, on your models",
    "evaluate": "score answers beside plain decoding's",
    "bench": "measure speed on your models and prompts",
    "report": "draw what bench measured, compare two files",
    "profile": "show where the time of a round goes",
    "train-draft": "train a draft for your target",
    "convert": "write a model in another format",
    "store": "keep outputs that method suffix drafts from",
    "plan": "project memory and speed elsewhere",
    "compile": "compile for devices that are elsewhere",
    "env": "show versions and devices",
}

_LIST = "\n".join(f"  {name:13} {summary}" for name, summary in COMMANDS.items())
OVERVIEW = f"""\
usage: spec-jax COMMAND [options]

Decode language models faster without changing what they
generate.

{_LIST}

  spec-jax COMMAND --help   the options of a command
  spec-jax --version        the version

For example, with a small model that is fetched once:

  spec-jax generate --target smollm2-135m-instruct \\
    --method prompt_lookup --chat --compare \\
    "Repeat: A draft is cheap, and the target checks it \\
at once. So the text is the same, and comes sooner."
""".rstrip()
