"""Patterns of English that no document may contain, with the page that explains them.

`docs/writing.md` is the guide. The patterns here are those of its rules that a program can see.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PATTERNS", "Fault", "documents", "faults", "sentences_of"]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = ("docs/reference/", "docs/results/", "docs/models.md")
"""Written by programs; their sentences stand in the code."""

OWN = r"(?:one's|its|his|her|their|our|your|\w+'s|\w+s')"

PATTERNS = {
    "write 'is not a'": r"(?<!\b[Tt]here )\b(?:is|are|was|were|be) no\b(?! (?:longer|more|less|\w+er than)\b)",
    "begin with the subject": r"^(?:Whom|Who|Whose|What(?! differs from the )|Of(?! the \d| \d))\b[^?]*$",
    "say what the program does": r"\b(?:told|said|heard|whom)\b",
    "write 'only'": r"(?<!\b[Ll]et )\balone\b",
    "write 'its own' before the noun": rf"\bof {OWN} own\b(?! (?:\w+|-))",
    "use the present or the past tense": r"\bhad (?:ended|been gone)\b",
    "write 'continue' or 'resume'": r"\b(?:go|goes|going|gone|went) on with\b",
    "name the thing, not a house": r"\b(?:in the house|under one roof|a room for|houses|lodgers?)\b",
    "name the thing": r"\bthat (?:is|are) none\b|\bone that there is\b|\bthat there (?:is|are) not\b",
    "write 'difference from', and 'a different ... from'": r"\bdifference to (?:the|its|their|those)\b|\banother \w+ than\b",
    "write 'outside'": r"\boutside of\b",
    "write 'no longer'": r"\b(?:not|no|none|nobody|nothing|cannot)\b[^.,;:]*\bany more\b",
    "write 'as in'": r"\bas of\b(?! \d)",
    "say what did not happen": r"\bin vain\b",
}  # fmt: skip
"""What to do instead, and the pattern that it replaces; each is matched against one sentence."""


@dataclass(frozen=True)
class Fault:
    """A sentence that breaks a rule.

    Attributes:
        remedy: what to write instead.
        sentence: the sentence, without code.
    """

    remedy: str
    sentence: str


def documents() -> list[Path]:
    """Every page that a person wrote: README, changelog, guide for contributors, docs and ADRs."""
    tops = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    pages = [*tops, *sorted(DOCS.rglob("*.md"))]
    written = []
    for page in pages:
        name = page.relative_to(ROOT).as_posix()
        if page.exists() and not name.startswith(GENERATED):
            written.append(page)
    return written


def sentences_of(text: str) -> Iterator[str]:
    """The sentences of a page; blocks of code, code in a line and addresses are left out."""
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", text)
    text = re.sub(r"(?s)<!--.*?-->", "", text)
    text = re.sub(r"`[^`]*`", "`code`", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.) ?)", text):
        if re.match(r"    \S", block.strip("\n")):
            continue
        prose = re.sub(r"\s+", " ", block).strip()
        for cell in prose.split("|") if prose.startswith("|") else [prose]:
            bare = re.sub(r"^(?:[-*#>]+|\d+\.) +", "", cell.strip()).replace("*", "")
            for sentence in re.split(r"(?<=[.!?:]) +(?=[A-Z`\[])", bare):
                if sentence:
                    yield sentence.strip()


def faults(text: str) -> list[Fault]:
    """Every sentence of a page that breaks a rule, once for each rule."""
    found = []
    for sentence in sentences_of(text):
        for remedy, pattern in PATTERNS.items():
            if re.search(pattern, sentence):
                found.append(Fault(remedy, sentence))
    return found


if __name__ == "__main__":
    for page in documents():
        for fault in faults(page.read_text()):
            print(f"{page.relative_to(ROOT)}: {fault.remedy}: {fault.sentence}")
