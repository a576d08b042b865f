"""The beginning of the page of all tables: the number of claims that hold, as text and picture."""

from collections.abc import Mapping, Sequence

from reproduction.claim_result import VERDICTS

PICTURE = "verdicts.svg"
"""Name of the picture, beside the page."""

_COLOURS = {
    # The first two are of Okabe and Ito's palette, which colour-blind readers can tell apart.
    "holds": "#009e73",
    "does not hold": "#d55e00",
    "undecided": "#c8c8c8",
    "out of reach here": "#a8a8c0",
    "repeated": "#56b4e9",
    "not run": "#eeeeee",
}
_UNIT = 9  # width of one claim
_ROW = 34
_LEFT = 150
_LEGEND_LEFT = 10
_LEGEND_ENTRY = 130


def totals(counts: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """Return the number of claims with each verdict, over all papers.

    Args:
        counts: for each paper, a cell for its name and one for each verdict.
    """
    return {verdict: sum(int(row[verdict]) for row in counts) for verdict in VERDICTS}


def in_words(counts: Sequence[Mapping[str, str]]) -> str:
    """Return the paragraph about the number of claims that hold, and its meaning."""
    total = totals(counts)
    claims = sum(total.values())
    return (
        f"**{total['holds']} of {claims} claims hold**, {total['does not hold']} do not hold, "
        f"{total['undecided']} are undecided, {total['out of reach here']} are out of reach here, "
        f"{total['repeated']} are repeated in another table, "
        f"and {total['not run']} have not been tested. A claim is "
        f"undecided if three seeds do not separate two arms, or if a run of reduced length did "
        f"not reach its target. Most runs have a reduced scale (fewer rounds, samples or "
        f"devices than in the paper), so a verdict holds for this scale and does not "
        f"confirm or refute the paper."
    )


def chart(counts: Sequence[Mapping[str, str]]) -> str:
    """Return an SVG with a bar of claims by verdict for each paper."""
    most = max((sum(totals([row]).values()) for row in counts), default=0)
    # The legend is wider than the bars of few claims.
    legend = _LEGEND_LEFT + _LEGEND_ENTRY * len(VERDICTS)
    width = max(_LEFT + _UNIT * most + 60, legend)
    height = _ROW * (len(counts) + 1) + 20
    shapes: list[str] = []
    left = _LEGEND_LEFT
    for verdict in VERDICTS:
        shapes.append(_bar(left, 8, 14, verdict))
        shapes.append(_text(left + 20, 20, verdict, "start"))
        left += _LEGEND_ENTRY
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
