"""The report of results made by hand: what they hold is drawn, and nothing else."""

import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from spec_jax.benchmarking.figures import LIGHT, Plot, png
from spec_jax.benchmarking.html_report import draw, render
from spec_jax.benchmarking.results import Results
from tests.benchmarking.handmade import PLAIN, SYSTEMS, drafting, header, results, run


class Page(HTMLParser):
    """Titles, figures' names, rows of tables, and whatever names another place."""

    def __init__(self, html: str):
        super().__init__()
        self.titles, self.figures, self.rows, self.links, self.open = [], [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        if tag == "svg":
            self.figures.append(values["aria-label"])
        if tag == "tr":
            self.rows.append([])
        if tag in ("link", "script", "img", "iframe"):
            self.links.append(tag)
        found = [
            v for k, v in attrs if k in ("href", "src", "xlink:href") and not v.startswith("#")
        ]
        self.links += found

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open:
            return
        if self.open[-1] in ("h1", "h2", "h3"):
            self.titles.append(data)
        if self.open[-1] in ("th", "td"):
            self.rows[-1].append(data)


def test_the_report_has_the_figures_and_no_link():
    html = render({"before": results()})
    page = Page(html)
    assert page.titles == [
        "Speculative decoding of <model>",
        "before",
        "Measured beside other work",
        "Mean token time",
        "By K: draft_model",
        "Why this K",
        "What a better draft length could gain",
        "By temperature",
        "By batch size",
        "Acceptance by position",
        "By category",
        "What calls cost",
        "All systems",
    ]
    assert page.figures[:4] == [
        "mean token time, ms by K",
        "speed-up by K",
        "tokens a call / (K + 1) by K",
        "loop time, ms by K",
    ]
    assert page.figures.count("speed-up by temperature") == 2
    assert page.figures.count("speed-up by batch size") == 2
    assert page.links == [] and not re.search(r"https?:|//|@import|url\((?!#)", html)
    assert "prefers-color-scheme: dark" in html and "width=device-width" in html
    assert "spec-jax bench --target &lt;model&gt; &amp; more" in html


def test_figures_take_the_colours_of_the_page():
    html = render({"before": results()})
    drawn = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(drawn) == 12
    for svg in drawn:
        # Clip paths and markers alone have other colours.
        assert not re.search(r"(?:fill|stroke): #(?!000000|ffffff)", svg)
        assert "var(--series-0)" in svg and "currentColor" in svg


def test_tables_have_the_numbers():
    page = Page(render({"before": results()}))
    plain = ["chat, greedy", "plain", "2250.00 (1500.00 - 3000.00)", "1.00", "1.00"]
    own = ["chat, greedy", "draft_model, K = 1", "1125.00 (750.00 - 1500.00)", "2.00", "2.00"]
    assert plain in page.rows and own in page.rows
    predicted = next(r for r in page.rows if r[1:2] == ["draft_model, K = 3"] and len(r) == 8)
    assert predicted[2:6] == ["2.00", "0.250", "2.00", "0.73"]
    doubt = ["chat, greedy", "plain", "tokens a second of the repeats differ by 67%"]
    assert doubt in page.rows
    assert ["b", "1.00 / 1.00", "2.00 / 2.00"] in page.rows
    assert any(r[0] == "batch 1" and r[3:] == ["4.0", "0.50"] for r in page.rows)


def test_only_what_was_measured_is_drawn():
    plain = Results(header(), [run(PLAIN, 0, 8.0, 4.0)])
    page = Page(render({"plain": plain}))
    assert page.figures == []
    assert page.titles[2:] == ["Mean token time", "By category", "All systems"]
    theirs = Results(
        header(), [run(PLAIN, 0, 8.0), run(SYSTEMS[3], 0, 4.0), run(drafting(1), 0, 2.0)]
    )
    assert Page(render({"r": theirs})).figures == [
        "mean token time, ms by K",
        "speed-up by K",
        "tokens a call / (K + 1) by K",
        "loop time, ms by K",
        "rounds that keep it by position in the draft",
    ]
    assert Page(render({"empty": Results(header())})).figures == []


def test_figures_as_files():
    files = draw(results())
    assert len(files) == 12 and "what_a_better_draft_length_could_gain_2.png" in files
    assert all(each.startswith(b"\x89PNG\r\n\x1a\n") for each in files.values())
    assert draw(Results(header())) == {}


def test_a_file_is_white_and_has_the_colours_of_the_light_page():
    image = pytest.importorskip("matplotlib.image")
    pixels = image.imread(io.BytesIO(png(Plot({"a": [(0, 1.0), (4, 2.0)]}, "K", "y"), "title")))
    assert pixels.shape[1] == 740 and pixels[0, 0].tolist() == [1, 1, 1, 1]
    colours = {tuple(np.rint(255 * each).astype(int)) for each in pixels.reshape(-1, 4)}
    assert (*bytes.fromhex(LIGHT.series[0][1:]), 255) in colours


def test_long_names_end_within_the_figure():
    image = pytest.importorskip("matplotlib.image")
    names = [f"humaneval, T = {t}, top-p 0.9" for t in (0.6, 0.8)]
    pixels = image.imread(io.BytesIO(png(Plot({name: [(0, 1.0)] for name in names}, "K", "y"), "")))
    assert (pixels[:, -4:] == 1).all()


def test_two_files_are_compared():
    page = Page(render({"before": results(), "after": results(scale=0.2)}))
    assert page.titles[1] == "Is it faster?"
    row = next(r for r in page.rows if r[:2] == ["chat, greedy", "draft_model, K = 1"])
    assert row[4].startswith("5.000 (") and row[5] == "faster"
