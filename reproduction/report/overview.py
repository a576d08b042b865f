"""The beginning of the page of all tables: how many claims hold, in words and as a picture."""

from collections.abc import Mapping, Sequence

from reproduction.figures import VERDICTS

PICTURE = "verdicts.svg"
"""Name of the picture, beside the page."""

_COLOURS = {
    "holds": "#009e73",
    "does not hold": "#d55e00",
    "undecided": "#c8c8c8",
    "not run": "#eeeeee",
}
_UNIT = 9  # width of one claim
_ROW = 34
_LEFT = 150


def totals(counts: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """Return the number of claims with each verdict, over all papers.

    Args:
        counts: for each paper a cell for its name and one for each verdict.
    """
    return {verdict: sum(int(row[verdict]) for row in counts) for verdict in VERDICTS}


def in_words(counts: Sequence[Mapping[str, str]]) -> str:
    """Return the paragraph that says how many claims hold, and what that means."""
    total = totals(counts)
    claims = sum(total.values())
    return (
        f"Of {claims} claims **{total['holds']} hold**, {total['does not hold']} do not hold, "
        f"{total['undecided']} are undecided, and {total['not run']} have not run. A claim is "
        f"undecided if three seeds do not separate two arms, or if a run of reduced length did "
        f"not reach its target. Most runs have a reduced scale (fewer rounds, samples or "
        f"devices than in the paper), so a verdict is about this scale, and no proof for or "
        f"against the paper."
    )


def chart(counts: Sequence[Mapping[str, str]]) -> str:
    """Return an SVG with a bar for each paper, whose parts are its claims by verdict."""
    most = max((sum(totals([row]).values()) for row in counts), default=0)
    width = _LEFT + _UNIT * max(most, 40) + 60
    height = _ROW * (len(counts) + 1) + 20
    shapes: list[str] = []
    left = 10
    for verdict in VERDICTS:
        shapes.append(_bar(left, 8, 14, verdict))
        shapes.append(_text(left + 20, 20, verdict, "start"))
        left += 130
    for number, row in enumerate(counts):
        top = _ROW * (number + 1) + 8
        shapes.append(_text(_LEFT - 10, top + 15, row["claims of"], "end"))
        left = _LEFT
        for verdict in VERDICTS:
            count = int(row[verdict])
            if count:
                shapes.append(_bar(left, top, _UNIT * count, verdict))
                shapes.append(_text(left + _UNIT * count / 2, top + 15, str(count), "middle"))
            left += _UNIT * count
    inside = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n{inside}\n</svg>\n'
    )


def _bar(
    left: float,
    top: float,
    width: float,
    verdict: str,
) -> str:
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="22" '
        f'fill="{_COLOURS[verdict]}" stroke="#fff"/>'
    )


def _text(
    x: float,
    y: float,
    words: str,
    anchor: str,
) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#222">{words}</text>'
