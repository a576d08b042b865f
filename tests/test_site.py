"""The documents hang together: each has its place on the site, and no link leads nowhere."""

import re
import subprocess
from pathlib import Path

from fleet_protocol.configuration import read_toml
from tests.site import problems

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def pages(nav):
    """The paths of a navigation, however deep."""
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from pages(value) if isinstance(value, list) else [value]


def test_every_document_has_one_place_on_the_site():
    """Readers do not find a page that is not in the navigation."""
    listed = sorted(pages(read_toml(ROOT / "zensical.toml")["project"]["nav"]))
    assert listed == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_every_relative_link_leads_to_a_file():
    """In each document of the source; one of the site links nothing beside it."""
    names = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    links = [
        (name, link, (ROOT / name).parent / link.partition("#")[0])
        for name in names.split()
        for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text())
        if not link.startswith(("https:", "http:", "#"))
    ]
    assert len(links) > 100
    assert [(name, link) for name, link, target in links if not target.exists()] == []
    outside = [
        (name, link) for name, link, target in links if not target.resolve().is_relative_to(DOCS)
    ]
    assert [each for each in outside if each[0].startswith("docs/")] == []


def test_a_built_page_with_a_fault_is_found(tmp_path):
    """A picture that is not there, programs, fonts and diagrams of another host; a link to one is
    none.
    """
    page = '<a href="https://a.b/c"></a><img src="no.png"><script src="https://a.b/x.js"></script>'
    (tmp_path / "index.html").write_text(
        page + '<pre class="mermaid"></pre><link rel="canonical" href="https://a.b">'
    )
    (tmp_path / "style.css").write_text(
        "@font-face { src: url('https://a.b/f.woff') } p { background: url(near.png) }"
    )
    found = [line.partition(": ")[2] for line in problems(tmp_path)]
    assert found[:2] == ["no.png is not there", "loads https://a.b/x.js"]
    assert len(found) == 4
