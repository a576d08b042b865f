"""Draws the pictures of the documents as SVG files: python -m tests.documents.pictures.

Each picture is a function that returns the text of a file in docs/pictures. The state machines are
drawn from the tables that the server and the agent run, so a picture cannot differ from the code.
"""

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

from broker_server.store import machine as round_machine
from device_runtime.agent import machine as device_machine

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
GREEN, BLUE, ORANGE, GREY = "#009e73", "#0072b2", "#d55e00", "#666"
FILLS = {GREEN: "#e6f5f0", BLUE: "#e8f1fa", ORANGE: "#fdf0e6", GREY: "#f4f4f4"}
HEAD = (
    '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
    'markerHeight="7" orient="auto-start-reverse">'
    '<path d="M0 0L10 5L0 10z" fill="#333"/></marker></defs>'
)


def canvas(width: int, height: int, shapes: Iterable[str]) -> str:
    """A file of shapes on a white ground."""
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif"><rect width="{width}" height="{height}" fill="#fff"/>'
    )
    return start + HEAD + "\n".join(shapes) + "</svg>\n"


def text(x: float, y: float, words: str, size: float = 12.5, anchor: str = "middle") -> str:
    """A line of text around or behind a point."""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}" '
        f'fill="#222">{escape(words)}</text>'
    )


def rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A filled rectangle with a border."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" '
        f'fill="{FILLS[colour]}" stroke="{colour}" stroke-width="1.5"/>'
    )


def box(x: float, y: float, width: float, colour: str, lines: list[str]) -> list[str]:
    """A rectangle with lines of text, the first of them larger."""
    height = 20 + 18 * len(lines)
    shapes = [rect(x, y, width, height, colour)]
    for number, line in enumerate(lines):
        shapes.append(text(x + width / 2, y + 22 + 18 * number, line, 12 if number else 14))
    return shapes


def arrow(x1: float, y1: float, x2: float, y2: float, words: str = "") -> list[str]:
    """A straight arrow with a word beside its middle."""
    line = (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="#333" '
        f'stroke-width="1.5" marker-end="url(#a)"/>'
    )
    shapes = [line]
    if words:
        shapes.append(text((x1 + x2) / 2, (y1 + y2) / 2 - 6, words, 11.5))
    return shapes


def grid(x: float, y: float, kept: Callable[[int, int], bool], colour: str) -> list[str]:
    """A matrix of eight rows and columns, with the kept entries in colour."""
    shapes = []
    for row in range(8):
        for column in range(8):
            fill = colour if kept(row, column) else "#fff"
            shapes.append(
                f'<rect x="{x + 16 * column:g}" y="{y + 16 * row:g}" width="16" height="16" '
                f'fill="{fill}" fill-opacity="0.55" stroke="#999" stroke-width="0.7"/>'
            )
    return shapes


def nested() -> str:
    """One weight matrix, and the corners of it that three kinds of boards train."""
    tiers = [
        ("width 1", "Jetson", 8, BLUE),
        ("width 1/2", "Raspberry Pi 5", 4, GREEN),
        ("width 1/4", "Raspberry Pi Zero 2 W", 2, ORANGE),
    ]
    shapes = [
        text(400, 26, "One global model; each device trains the largest sub-model it can hold", 15)
    ]
    for number, (width, board, units, colour) in enumerate(tiers):
        left = 60 + 190 * number
        shapes += grid(left, 60, lambda row, column, n=units: row < n and column < n, colour)
        shapes.append(text(left + 64, 212, width, 14))
        shapes.append(text(left + 64, 231, board))
        if number:
            shapes.append(text(left - 31, 130, "+", 24))
    shapes.append(text(600, 130, "=", 24))
    shapes += [
        rect(630, 60, 128, 128, BLUE),
        rect(630, 60, 64, 64, GREEN),
        rect(630, 60, 32, 32, ORANGE),
        text(646, 81, "3", 14),
        text(678, 105, "2", 14),
        text(726, 160, "1", 14),
        text(694, 212, "aggregate", 14),
        text(694, 231, "devices per entry"),
    ]
    return canvas(800, 250, shapes)


def slicing() -> str:
    """Which units a half-width device trains in three rounds, by plan, and depth."""
    shapes = []
    plans = [
        ("static", lambda unit, _shift: unit < 4),
        ("rolling", lambda unit, shift: (unit - shift) % 8 < 4),
    ]
    for row, (name, keeps) in enumerate(plans):
        top = 30 + 180 * row
        shapes.append(text(20, top + 70, name, 15, "start"))
        for number in range(3):
            shift = 2 * number
            shapes += grid(
                130 + 170 * number,
                top,
                lambda y, x, s=shift, k=keeps: k(x, s) and k(y, s),
                GREEN if name == "static" else BLUE,
            )
            shapes.append(text(194 + 170 * number, top + 146, f"round {number + 1}"))
    shapes.append(text(20, 450, "depth", 15, "start"))
    for number, (label, kept) in enumerate([("4 blocks", 4), ("2 blocks", 2), ("1 block", 1)]):
        left = 130 + 170 * number
        for block in range(4):
            colour = ORANGE if block < kept else GREY
            shapes.append(rect(left + 26 * block, 420, 22, 60, colour))
        shapes.append(rect(left + 108, 420, 22, 60, BLUE))
        shapes.append(text(left + 64, 500, f"{label} and the head"))
    return canvas(650, 520, shapes)


def trust() -> str:
    """Who signs what in an enrolled fleet."""
    shapes = [
        *box(
            300, 20, 220, BLUE, ["operator", "operator.pem (Ed25519)", "shoal init, enroll, revoke"]
        ),
        *box(40, 190, 220, GREEN, ["server", "server.enrolment", "signs tasks and blobs"]),
        *box(560, 190, 220, ORANGE, ["device pi-1", "pi-1.enrolment", "signs status and updates"]),
        *box(300, 190, 220, GREY, ["broker", "TLS and logins", "sees names, sizes and times"]),
        *arrow(340, 94, 160, 188, "certifies"),
        *arrow(480, 94, 660, 188, "certifies"),
        *arrow(260, 225, 298, 225),
        *arrow(520, 225, 558, 225),
        *arrow(298, 245, 262, 245),
        *arrow(558, 245, 522, 245),
        text(
            410, 290, "chunks are sealed: updates to the server's key, weights to the fleet's key"
        ),
        text(410, 310, "a revoked device: the operator signs a list, and the fleet's key changes"),
    ]
    return canvas(820, 330, shapes)


def round_timeline() -> str:
    """A round from its plan to its judgement, for a server and three devices."""
    lanes = {
        "server": [
            (0, 70, "plan", BLUE),
            (470, 90, "aggregate", BLUE),
            (570, 110, "evaluate", BLUE),
        ],
        "device 1": [
            (90, 50, "fetch", GREY),
            (145, 110, "train", GREEN),
            (260, 60, "upload", ORANGE),
        ],
        "device 2": [
            (90, 50, "fetch", GREY),
            (145, 200, "train", GREEN),
            (350, 60, "upload", ORANGE),
        ],
        "device 3": [(90, 70, "fetch", GREY), (165, 380, "train (straggler)", GREEN)],
    }
    shapes = []
    for number, (name, spans) in enumerate(lanes.items()):
        top = 30 + 56 * number
        shapes.append(text(16, top + 25, name, 13, "start"))
        shapes.append(f'<line x1="100" y1="{top + 40}" x2="800" y2="{top + 40}" stroke="#ddd"/>')
        for start, width, words, colour in spans:
            shapes.append(rect(100 + start, top, width, 36, colour))
            shapes.append(text(100 + start + width / 2, top + 23, words, 12))
    for x, words in ((180, "offers"), (520, "quorum"), (565, "round closes")):
        shapes.append(
            f'<line x1="{x}" y1="20" x2="{x}" y2="262" stroke="#999" stroke-dasharray="4 3"/>'
        )
        shapes.append(text(x, 280 + (16 if words == "quorum" else 0), words, 12))
    shapes.append(
        text(450, 318, "the update of a straggler is dropped, or counts later with a buffer", 12)
    )
    return canvas(820, 335, shapes)


def rollout() -> str:
    """The stages of a rollout, and the phases of a release on a device."""
    stages = ["5 % of devices", "25 %", "100 %"]
    shapes: list[str] = []
    for number, stage in enumerate(stages):
        shapes += box(60 + 240 * number, 20, 150, BLUE, [stage, "all succeeded?"])
        if number:
            shapes += arrow(240 * number - 30, 48, 58 + 240 * number, 48, "yes")
        shapes += arrow(135 + 240 * number, 76, 135 + 240 * number, 128, "")
    shapes += [
        *box(
            60,
            130,
            630,
            ORANGE,
            ["too many failed: the rollout stops; devices that run the release keep it"],
        )
    ]
    phases = ["running", "fetched", "trial", "running"]
    for number, phase in enumerate(phases):
        shapes += box(60 + 180 * number, 215, 110, GREEN, [phase])
        if number:
            word = ("", "signature", "self-test", "server replies")[number]
            shapes += arrow(180 * number - 8, 234, 58 + 180 * number, 234, "")
            shapes.append(text(180 * number + 25, 208, word, 11.5))
    shapes += [
        *arrow(475, 254, 475, 292),
        *box(345, 294, 260, ORANGE, ["failed: the previous release runs"]),
    ]
    return canvas(790, 345, shapes)


TURN = (
    '<path d="M 535 76 L 535 98 L 85 98 L 85 118" fill="none" stroke="#333" '
    'stroke-width="1.5" marker-end="url(#a)"/>'
)
"""An arrow from the end of the first row to the beginning of the second."""


def first_boot() -> str:
    """What a card does from power-on to its first update."""
    steps = [
        ("firmware", "Pi firmware or UEFI"),
        ("kernel", "root is read-only"),
        ("/data", "grows, is checked"),
        ("enrolment", "moves to /etc/shoal"),
        ("network", "cable or Wi-Fi"),
        ("agent", "TLS to the broker"),
        ("first task", "fetch, train, upload"),
    ]
    shapes: list[str] = []
    for number, (name, words) in enumerate(steps):
        left = 20 + 150 * (number % 4)
        top = 20 if number < 4 else 120
        shapes += box(left, top, 130, GREEN if number > 4 else GREY, [name, words])
        if number not in (3, 6):
            shapes += arrow(left + 130, top + 28, left + 148, top + 28)
    shapes += [
        TURN,
        text(
            310,
            205,
            "a power cut at any point: the next start resumes from the last completed step",
        ),
    ]
    return canvas(620, 220, shapes)


Edge = tuple[str, str, str]


def edges_of(transitions: dict) -> list[Edge]:
    """The edges of a table of transitions: state, next state, event."""
    return [
        (state.value, after.value, event.value) for (state, event), after in transitions.items()
    ]


def states(places: dict[str, tuple[int, int]], edges: list[Edge], height: int) -> str:
    """States at their places, with one arrow for all events between two of them."""
    events: dict[tuple[str, str], list[str]] = {}
    for state, after, event in edges:
        events.setdefault((state, after), []).append(event)
    shapes: list[str] = []
    for (state, after), names in events.items():
        x1, y1 = places[state]
        x2, y2 = places[after]
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        across = ((y2 - y1) / length, (x1 - x2) / length)
        bend = 26 if (after, state) in events else 0
        middle = ((x1 + x2) / 2 + across[0] * bend, (y1 + y2) / 2 + across[1] * bend)
        start = _border((x1, y1), middle)
        end = _border((x2, y2), middle)
        shapes.append(
            f'<path d="M {start[0]:.0f} {start[1]:.0f} Q {middle[0]:.0f} {middle[1]:.0f} '
            f'{end[0]:.0f} {end[1]:.0f}" fill="none" stroke="#555" stroke-width="1.3" '
            f'marker-end="url(#a)"/>'
        )
        for number, name in enumerate(names):
            shapes.append(_label(middle[0], middle[1] - 4 + 13 * number, name))
    for name, (x, y) in places.items():
        shapes.append(rect(x - 50, y - 17, 100, 34, BLUE))
        shapes.append(text(x, y + 5, name, 13))
    width = max(x for x, _ in places.values()) + 90
    return canvas(width, height, shapes)


def _label(x: float, y: float, words: str) -> str:
    ground = 'stroke="#fff" stroke-width="4" paint-order="stroke"'
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle" font-size="11" fill="#444" '
        f"{ground}>{escape(words)}</text>"
    )


def _border(centre: tuple[int, int], towards: tuple[float, float]) -> tuple[float, float]:
    """Where a line from the centre of a state leaves its rectangle."""
    across = towards[0] - centre[0]
    down = towards[1] - centre[1]
    scale = 1 / max(abs(across) / 51, abs(down) / 18)
    return centre[0] + across * scale, centre[1] + down * scale


ROUND_PLACES = {
    "planned": (70, 40),
    "open": (250, 40),
    "collecting": (430, 40),
    "merging": (640, 40),
    "closed": (820, 40),
    "abandoned": (430, 190),
}
DEVICE_PLACES = {
    "starting": (70, 60),
    "probing": (230, 60),
    "idle": (230, 330),
    "fetching": (430, 200),
    "sizing": (540, 60),
    "training": (640, 130),
    "measuring": (640, 270),
    "uploading": (830, 200),
    "dropping": (640, 430),
    "refusing": (70, 200),
}
EXITS = {
    "cancelled",
    "expired",
    "failed",
    "rejected",
    "resume-expired",
    "resume-poisoned",
    "stop",
    "superseded",
}
"""Events that end a task early; almost every state has them, so the picture leaves them out."""


def round_states() -> str:
    """The states of a round, all edges."""
    return states(ROUND_PLACES, edges_of(round_machine.TRANSITIONS), 230)


def device_states() -> str:
    """The states of a device's agent, without the events that end a task early."""
    shown = []
    for edge in edges_of(device_machine.TRANSITIONS):
        if edge[2] not in EXITS:
            shown.append(edge)
    return states(DEVICE_PLACES, shown, 470)


PICTURES: dict[str, Callable[[], str]] = {
    "nested": nested,
    "slicing": slicing,
    "trust": trust,
    "round": round_timeline,
    "rollout": rollout,
    "first-boot": first_boot,
    "round-states": round_states,
    "device-states": device_states,
}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
