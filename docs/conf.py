"""The documentation site: `sphinx-build -W -b html docs docs/_build`."""

import os
import re
import tomllib
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "spec-jax"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
html_title = f"{project} {version}"
html_theme = "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

default_role = "literal"  # docstrings write names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say what arguments are
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def linked(page: Path) -> Path:
    """The file that a page's first link names."""
    found = LINK.search(page.read_text(encoding="utf-8"))
    assert found is not None, f"{page} names no file"
    return (page.parent / found[1]).resolve()


ELSEWHERE = {linked(page): page for page in (DOCS / "project").glob("*.md")}
"""Files such as the README -> the pages of `project/`, which stand for them."""


def with_links_inside(app: object, docname: str, source: list[str]) -> None:
    """Reads the pages that stand for other files, and makes links to such files lead to them."""
    page = DOCS / f"{docname}.md"
    file = next((each for each, its_page in ELSEWHERE.items() if its_page == page), page)

    def inside(match: re.Match[str]) -> str:
        named = (file.parent / match[1]).resolve()
        return f"]({os.path.relpath(ELSEWHERE.get(named, named), page.parent)}{match[2] or ''})"

    text = source[0] if file == page else file.read_text(encoding="utf-8")
    source[0] = LINK.sub(inside, text)


def setup(app) -> None:
    """Has Sphinx call `with_links_inside` for each page that it reads."""
    app.connect("source-read", with_links_inside)
