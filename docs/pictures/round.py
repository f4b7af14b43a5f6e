"""Draws a round of speculative decoding: `python docs/pictures/round.py` writes round.svg."""

from pathlib import Path

TEXT = ("The", "cat", "sat")
DRAFT = ("on", "the", "mat", "and")
NUM_ACCEPTED = 2
"""Tokens of the draft; the target chooses the next token."""
TARGET_TOKEN = "sofa"

WIDTH, HEIGHT = 860, 290
BOX, GAP, BOX_HEIGHT = 66, 8, 34
LEFT = 196
ROWS = {"draft": 36, "target": 126, "text": 236}

STYLE = """
text { font: 15px system-ui, sans-serif; fill: #1b1f24; }
.small { font-size: 13px; fill: #57606a; }
.token { fill: #f6f8fa; stroke: #8c959f; }
.drafted { fill: #ddebfb; stroke: #0b62c4; }
.accepted { fill: #d8f3df; stroke: #15803d; }
.rejected { fill: #fde3d5; stroke: #c2410c; }
.rejected-text { text-decoration: line-through; }
.call { fill: none; stroke: #57606a; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ec; }
  .small { fill: #9aa4af; }
  .token { fill: #1b2128; stroke: #6b7580; }
  .drafted { fill: #12304f; stroke: #6cb0ff; }
  .accepted { fill: #143d22; stroke: #5fd38a; }
  .rejected { fill: #4a2613; stroke: #ff9a5c; }
  .call { stroke: #9aa4af; }
}
"""


def place(column: int) -> int:
    """The left edge of a column of tokens."""
    return LEFT + column * (BOX + GAP)


def box(column: int, row: str, text: str, kind: str) -> str:
    """A token."""
    x, y = place(column), ROWS[row]
    name = ' class="rejected-text"' if kind == "rejected" else ""
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{BOX}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<text{name} x="{x + BOX // 2}" y="{y + 22}" text-anchor="middle">{text}</text>'
    )


def label(row: str, title: str, below: str) -> str:
    """What a row shows, at its left."""
    y = ROWS[row]
    return (
        f'<text x="12" y="{y + 14}">{title}</text>'
        f'<text class="small" x="12" y="{y + 32}">{below}</text>'
    )


def call(first: int, last: int, row: str, text: str) -> str:
    """A bracket around the tokens that one call reads or writes."""
    left, right, y = place(first) - 4, place(last) + BOX + 4, ROWS[row] - 8
    return (
        f'<path class="call" d="M{left} {y + 6} v-6 H{right} v6"/>'
        f'<text class="small" x="{(left + right) // 2}" y="{y - 6}" '
        f'text-anchor="middle">{text}</text>'
    )


def draw() -> str:
    """The picture as SVG, light or dark as the reader's page is."""
    start = len(TEXT)
    verified = [
        *(("accepted", token) for token in DRAFT[:NUM_ACCEPTED]),
        *(("rejected", token) for token in DRAFT[NUM_ACCEPTED:]),
    ]
    parts = [
        label("draft", "1. The draft", "proposes K = 4 tokens"),
        *(box(i, "draft", token, "token") for i, token in enumerate(TEXT)),
        *(box(start + i, "draft", token, "drafted") for i, token in enumerate(DRAFT)),
        call(start, start + len(DRAFT) - 1, "draft", "4 cheap calls, one after the other"),
        label("target", "2. The target", "scores all of them"),
        *(box(start + i, "target", token, kind) for i, (kind, token) in enumerate(verified)),
        call(start - 1, start + len(DRAFT) - 1, "target", "one call of the large model"),
        box(start - 1, "target", TEXT[-1], "token"),
        f'<text class="small" x="{place(start - 1)}" y="{ROWS["target"] + BOX_HEIGHT + 20}">'
        "accepted with probability min(1, p / q), p of the target, q of the draft</text>",
        label("text", "3. The text", "as if the target wrote alone"),
        *(box(i, "text", token, "token") for i, token in enumerate(TEXT)),
        *(
            box(start + i, "text", token, "accepted")
            for i, token in enumerate(DRAFT[:NUM_ACCEPTED])
        ),
        box(start + NUM_ACCEPTED, "text", TARGET_TOKEN, "accepted"),
        call(start, start + NUM_ACCEPTED, "text", "3 tokens for one call"),
        f'<text class="small" x="{place(start + NUM_ACCEPTED + 1) + 6}" y="{ROWS["text"] + 14}">'
        "the last token is the target's,</text>",
        f'<text class="small" x="{place(start + NUM_ACCEPTED + 1) + 6}" y="{ROWS["text"] + 32}">'
        "drawn from the residual</text>",
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" role="img" aria-label="A round of speculative decoding">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
