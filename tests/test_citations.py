"""Nothing that code and pages refer to is missing: sections, vectors, links, decisions, files and
modules.

``docs/methods/specification.md`` is what the code cites, in the form "specification 1.5" or "vector
H8"; the page says so itself.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPECIFICATION = ROOT / "docs" / "methods" / "specification.md"
DECISIONS = ROOT / "docs" / "adr"
HISTORY = ROOT / "CHANGELOG.md"  # names what is gone
TEXT = {".py", ".md", ".toml", ".json", ".j2", ".txt", ".yaml", ".yml", ""}
GENERATED = {
    "build",
    "dist",
    "runs",
    "artifacts",
    "results",
    "out",
    "node_modules",
    "mutants",
    "htmlcov",
}
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")}

SECTION = r"\d(?:\.\d+)?(?: ?[a-e]\b)?"
NEXT = r"(?:,| and|, and| to| or) "
CITED = re.compile(
    rf"specification,? (?:sections? )?({SECTION}(?:{NEXT}\d\.\d+)*)(?:, step (\d+))?", re.IGNORECASE
)
APPENDIX = re.compile(r"specification,? appendix (\w)\b", re.IGNORECASE)
NOTATION = re.compile(r"specification,? [\"']?shared notation", re.IGNORECASE)
VECTOR = r"[HRIWFD]\d{1,2}b?"
VECTORS = re.compile(
    rf"\b(?:vectors?|worked examples?) ({VECTOR}(?:{NEXT}{VECTOR})*)\b", re.IGNORECASE
)
KEY = re.compile(rf"[\"']({VECTOR})-[a-z]")  # of an entry in a file of worked examples: "H8-sbn"
DECISION = re.compile(r"\bADR[ -]0*(\d+)|\badr/0*(\d+)")


@cache
def texts() -> tuple[Path, ...]:
    """Every text file of the repository that somebody wrote; hidden folders hold environments."""
    tops = [top for top in ROOT.iterdir() if not top.name.startswith(".") or top.name == ".ci"]
    return tuple(
        path
        for path in sorted(path for top in tops for path in (top, *top.rglob("*")))
        if path.is_file()
        and path.suffix in TEXT
        and not (
            set(path.relative_to(ROOT).parts[:-1]) & GENERATED and ROOT / "docs" not in path.parents
        )
        and not any(
            part.startswith(".") and part != ".ci" for part in path.relative_to(ROOT).parts[:-1]
        )
        and not any(part.endswith(".egg-info") for part in path.parts)
    )


@cache
def read(path: Path) -> str:
    return path.read_text("utf-8")


@cache
def flat(path: Path) -> str:
    """The text without its line ends, so that a citation that wraps is one string."""
    joined = re.sub(r"[\"']\s*\n\s*(?:rf|fr|r|f)?[\"']", "", read(path))  # adjacent string literals
    return re.sub(r"\s*(?:\n|\\n)\s*(?:#|>)?\s*", " ", joined)


def pages() -> list[Path]:
    return [path for path in texts() if path.suffix == ".md"]


def sections() -> dict[str, str]:
    """Text of each section of the specification, by number, and of appendices, by letter."""
    parts = re.split(r"(?m)^#{2,3} (.*)$", read(SPECIFICATION))
    found = {}
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        number = re.match(r"(?:Appendix )?(\d\.\d+|\d|[A-Z])\b\.?", title)
        found[number[1] if number else title] = text
    return found


def vectors() -> set[str]:
    """Entries of appendix A, whose paragraphs begin with their names in bold."""
    begins = re.findall(r"(?m)^\*\*.*", read(SPECIFICATION))
    return {name for line in begins for name in re.findall(rf"\*\*({VECTOR})\*\*", line)}


def found(pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    """Matches in all files but this one, whose patterns and examples cite nothing."""
    for path in texts():
        if path != Path(__file__):
            for match in pattern.finditer(flat(path)):
                yield path, match


def test_every_cited_section_exists():
    """Numbers, letters of their items ("1.6 c") and steps ("1.2, step 6") included."""
    known = sections()
    cited = 0
    for path, match in found(CITED):
        where = f"{path.relative_to(ROOT)}: {match[0]!r}"
        for number, letter in re.findall(r"(\d(?:\.\d+)?) ?([a-e]\b)?", match[1]):
            assert number in known, f"{where}: no section {number}"
            assert not letter or f"\n{letter}. " in known[number], (
                f"{where}: {number} has no item {letter}"
            )
            cited += 1
        last = re.findall(r"\d(?:\.\d+)?", match[1])[-1]
        assert not match[2] or f"\n{match[2]}. " in known[last], (
            f"{where}: {last} has no step {match[2]}"
        )
    assert cited > 50, "the citations were not found; has their form changed?"
    for path, match in found(APPENDIX):
        assert match[1].upper() in known, f"{path.relative_to(ROOT)}: {match[0]!r}"
    assert any(True for _ in found(NOTATION))
    assert "Shared notation" in known


def test_the_specification_has_one_name():
    """No file cites it by the name of a file that is not in the repository."""
    for path, match in found(re.compile(r"\bMETHODS\b")):
        raise AssertionError(
            f"{path.relative_to(ROOT)} cites {match[0]}; cite docs/methods/specification.md"
        )


def test_every_cited_vector_exists():
    known = vectors()
    cited = 0
    for pattern in (VECTORS, KEY):
        for path, match in found(pattern):
            for name in re.findall(VECTOR, match[1]):
                assert name in known, (
                    f"{path.relative_to(ROOT)}: {match[0]!r}: appendix A has no {name}"
                )
                cited += 1
    assert cited > 20, "the citations were not found; has their form changed?"


def slugs(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    seen: dict[str, int] = {}
    for title in re.findall(r"(?m)^#{1,6} (.*?)\s*$", without_code(read(path))):
        slug = re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        if seen[slug]:
            seen[f"{slug}-{seen[slug]}"] = 0
    return set(seen)


def without_code(text: str) -> str:
    return re.sub(r"(?ms)^ *```.*?^ *```", "", text)


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page):
    """Files and anchors of relative links; other sites are not asked."""
    for target in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_code(read(page)))
    ):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{target} is not there"
        assert not anchor or anchor in slugs(there), f"{there.name} has no heading #{anchor}"


def test_every_decision_that_is_named_exists():
    known = {int(path.name[:4]) for path in DECISIONS.glob("[0-9]*.md")}
    for path, match in found(DECISION):
        assert int(match[1] or match[2]) in known, f"{path.relative_to(ROOT)}: {match[0]!r}"


@pytest.mark.parametrize("page", sorted(DECISIONS.glob("[0-9]*.md")), ids=lambda path: path.stem)
def test_a_decision_says_what_was_rejected_and_what_it_costs(page):
    """Numbers agree and are used once; what was rejected is there from the fourth on."""
    number = int(page.name[:4])
    assert read(page).startswith(f"# {number}. ")
    assert len(list(DECISIONS.glob(f"{number:04}-*"))) == 1
    if number > 3:
        headings = re.findall(r"(?m)^## (.*)$", read(page))
        assert headings[:2] == ["Context", "Decision"]
        assert set(headings[2:]) in ({"Rejected", "Downside"}, {"Rejected", "Consequences"})


@pytest.mark.parametrize(
    "page",
    [page for page in pages() if page != HISTORY],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_files_that_a_page_names_exist(page):
    """`device_runtime/settings.py` in a page is a file; what a reader shall write himself stands in
    a block.
    """
    tops = {
        path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")
    } - GENERATED
    for name in re.findall(r"`([\w.-]+/[\w./-]*)`", without_code(read(page))):
        if name.split("/")[0] in tops:
            assert (ROOT / name).exists(), f"{name} is not there"


def test_modules_that_are_named_exist():
    """`device_runtime.settings` in a docstring or page is a module, or something that stands in
    one.
    """
    for path, match in found(
        re.compile(rf"`((?:{'|'.join(sorted(PACKAGES))})(?:\.\w+)+)`", re.ASCII)
    ):
        parts = match[1].split(".")
        module = next(
            (parts[:n] for n in range(len(parts), 0, -1) if is_module(ROOT.joinpath(*parts[:n]))),
            [],
        )
        rest = parts[len(module) :]
        where = f"{path.relative_to(ROOT)}: {match[0]}"
        if path == HISTORY or rest in (["toml"], ["py"], ["db"]):  # names of files
            continue
        assert len(module) > 1 or rest, where
        file = ROOT.joinpath(*module)
        text = read(file / "__init__.py" if file.is_dir() else file.with_suffix(".py"))
        assert all(re.search(rf"\b{name}\b", text) for name in rest), (
            f"{where}: {rest} is not in {'.'.join(module)}"
        )


def is_module(path: Path) -> bool:
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
