"""Looks at a built site: what its pages link to is there, and nothing is loaded from another host.

python -m tests.site build/site
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    "stylesheet",
    "icon",
    "preload",
    "modulepreload",
    "preconnect",
    "dns-prefetch",
    "manifest",
}


class _Links(HTMLParser):
    """Attributes:
    links: what is followed, and what is loaded with the page: address and whether it is loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.links: list[tuple[str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = {name: value or "" for name, value in attrs}
        self.links += [
            (own[name], True) for name in ("src", "srcset", "poster", "data") if own.get(name)
        ]
        if own.get("href"):
            self.links.append(
                (
                    own["href"],
                    tag != "a" and not (tag == "link" and not LOADED & {*own["rel"].split()}),
                )
            )


def problems(site: Path) -> Iterator[str]:
    """One line for each link that leads nowhere, and each thing that a browser would ask another
    host for.
    """
    for page in sorted(site.rglob("*.html")):
        found = _Links()
        found.feed(page.read_text())
        for link, loaded in found.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if loaded and parts.scheme != "data":
                    yield f"{page}: loads {link}"
            elif parts.path and page.name != "404.html":  # whose links are from the root of a host
                target = page.parent / unquote(parts.path)
                if not (target / "index.html" if target.is_dir() else target).is_file():
                    yield f"{page}: {link} is not there"
        if 'class="mermaid' in page.read_text():
            yield f"{page}: a mermaid diagram, whose program comes from another host"
    for sheet in sorted(site.rglob("*.css")):
        for link in re.findall(
            r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)", sheet.read_text()
        ):
            yield f"{sheet}: loads {link}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    pages = len([*folder.rglob("*.html")])
    wrong = [*problems(folder)]
    print(*wrong, f"{pages} pages, {len(wrong)} wrong", sep="\n")
    sys.exit(bool(wrong) or pages < 50)
