"""Prompts for training the demo draft: questions, code and copy tasks, none of them evaluated on.

    PYTHONPATH=. python benchmarks/draft_data.py --out prompts.jsonl

Questions are invented by the target itself (Magpie, arXiv 2406.08464). Code is the head of a
function of Python's standard library, up to the end of its docstring. Copy tasks ask for a
paragraph of the standard library's documentation once more, in one way or another.
"""

import argparse
import ast
import inspect
import json
import os
import random
import sysconfig
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from spec_jax import LLM
from spec_jax.training.sampling import Sampler
from tests.prompts import COPY_PROMPTS, PROMPTS

RECIPE = "checkpoints/smollm2-135m-instruct.toml"
ASKS = (
    "Repeat this text word for word:\n\n{}",
    "Correct the spelling and grammar of this text:\n\n{}",
    "Rewrite this text in the past tense:\n\n{}",
    "Copy this and add a title:\n\n{}",
    "Make a list of the sentences in this text:\n\n{}",
    "Translate what is not English in this text and repeat the rest:\n\n{}",
)
PAGE = (60, 600)
"""Characters of a paragraph or of the head of a function."""


def sources():
    """The standard library's modules, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if {"test", "tests", "idlelib", "site-packages", "lib2to3"} & set(parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            yield text, ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue


def heads_and_paragraphs():
    """Function heads with their docstrings, and paragraphs of docstrings."""
    heads, paragraphs = {}, {}
    for text, tree in sources():
        lines = text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                continue
            doc = ast.get_docstring(node)
            if not doc:
                continue
            for paragraph in inspect.cleandoc(doc).split("\n\n"):
                if PAGE[0] <= len(paragraph) <= PAGE[1] and ">>>" not in paragraph:
                    paragraphs[" ".join(paragraph.split())] = None
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                head = lines[node.lineno - 1 : node.body[0].end_lineno]
                indent = len(head[0]) - len(head[0].lstrip())
                code = "\n".join(line[indent:] for line in head) + "\n"
                if PAGE[0] <= len(code) <= PAGE[1]:
                    heads[code] = None
    return list(heads), list(paragraphs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=3000)
    parser.add_argument("--code", type=int, default=2500)
    parser.add_argument("--copies", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pick = random.Random(args.seed)
    heads, paragraphs = heads_and_paragraphs()
    llm = LLM(RECIPE, dtype="bfloat16", max_num_seqs=64)
    asked = Sampler(llm, 256).questions(args.questions, args.seed)
    evaluated = {*PROMPTS, *COPY_PROMPTS}
    prompts = [{"messages": [{"role": "user", "content": each}]} for each in asked]
    prompts += [{"prompt": head} for head in pick.sample(heads, min(args.code, len(heads)))]
    chosen = pick.sample(paragraphs, min(args.copies, len(paragraphs)))
    prompts += [
        {"messages": [{"role": "user", "content": pick.choice(ASKS).format(each)}]}
        for each in chosen
    ]
    prompts = [
        each
        for each in prompts
        if each.get("prompt", each.get("messages", [{}])[0].get("content")) not in evaluated
    ]
    pick.shuffle(prompts)
    args.out.write_text("".join(json.dumps(each) + "\n" for each in prompts))
    print(
        f"{len(prompts)} prompts: {len(asked)} questions, of {len(heads)} heads and "
        f"{len(paragraphs)} paragraphs {min(args.code, len(heads))} and {len(chosen)}"
    )


if __name__ == "__main__":
    main()
