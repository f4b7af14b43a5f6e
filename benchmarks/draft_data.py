"""What the demo draft learns from, none of it evaluated on.

    python -m benchmarks.draft_data prompts --out prompts.jsonl
    python -m benchmarks.draft_data texts --out texts.jsonl

`prompts` are questions, which the target itself invents (Magpie, arXiv 2406.08464), heads of
functions of Python's standard library, up to the end of the docstring, and copy tasks, which ask
for a paragraph of its docstrings once more, in one way or another. The target answers them.

`texts` are whole functions of the standard library, and the chapters of the language reference that
it holds. The target only reads them, which takes a fraction of the time.
"""

import argparse
import ast
import inspect
import json
import os
import random
import sysconfig
import textwrap
from pathlib import Path
from pydoc_data import topics

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from spec_jax import LLM
from spec_jax.training.sampling import RowSampler
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
FUNCTION = (400, 1600)
"""Characters of a whole function or of a piece of the language reference."""


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


def functions_and_chapters():
    """Whole functions with docstrings, and pieces of the language reference."""
    functions = {}
    for text, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                code = textwrap.dedent(ast.get_source_segment(text, node, padded=True))
                if FUNCTION[0] <= len(code) <= FUNCTION[1]:
                    functions[code + "\n"] = None
    chapters = []
    for _, chapter in sorted(topics.topics.items()):
        piece = ""
        for paragraph in chapter.split("\n\n"):
            piece += " ".join(paragraph.split()) + "\n\n"
            if len(piece) >= FUNCTION[0]:
                chapters.append(piece)
                piece = ""
    return list(functions), [each for each in chapters if len(each) <= FUNCTION[1]]


def texts(args):
    functions, chapters = functions_and_chapters()
    pick = random.Random(args.seed)
    chosen = pick.sample(functions, min(args.functions, len(functions)))
    read = pick.sample(chapters, min(args.chapters, len(chapters)))
    texts = [*chosen, *read]
    pick.shuffle(texts)
    args.out.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    print(f"of {len(functions)} functions {len(chosen)}, of {len(chapters)} pieces {len(read)}")


def prompts(args):
    pick = random.Random(args.seed)
    heads, paragraphs = heads_and_paragraphs()
    llm = LLM(RECIPE, dtype="bfloat16", max_num_seqs=64)
    questions = RowSampler(llm, 256).questions(args.questions, args.seed)
    evaluated = {*PROMPTS, *COPY_PROMPTS}
    records = [{"messages": [{"role": "user", "content": each}]} for each in questions]
    records += [{"prompt": head} for head in pick.sample(heads, min(args.code, len(heads)))]
    chosen = pick.sample(paragraphs, min(args.copies, len(paragraphs)))
    records += [
        {"messages": [{"role": "user", "content": pick.choice(ASKS).format(each)}]}
        for each in chosen
    ]
    records = [
        each
        for each in records
        if each.get("prompt", each.get("messages", [{}])[0].get("content")) not in evaluated
    ]
    pick.shuffle(records)
    args.out.write_text("".join(json.dumps(each) + "\n" for each in records))
    print(
        f"{len(records)} prompts: {len(questions)} questions, of {len(heads)} heads and "
        f"{len(paragraphs)} paragraphs {min(args.code, len(heads))} and {len(chosen)}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("prompts", "texts"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=3000)
    parser.add_argument("--code", type=int, default=2500)
    parser.add_argument("--copies", type=int, default=800)
    parser.add_argument("--functions", type=int, default=600)
    parser.add_argument("--chapters", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    {"prompts": prompts, "texts": texts}[args.what](args)


if __name__ == "__main__":
    main()
