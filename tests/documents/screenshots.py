"""Takes the screenshots of the documents from a demo's folder, with an installed Chromium.

python -m tests.documents.screenshots runs/demo-digits-...
"""

import argparse
import shutil
from contextlib import closing
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from broker_server.settings.fleet import ViewConfig
from broker_server.store import Store
from shoal.view.serving import serving

PICTURES = Path(__file__).parents[2] / "docs"
SIZE = {"width": 1200, "height": 760}
WAIT_MS = 4000
"""For figures to be drawn; the page has no event for it."""


def capture(browser: Browser, address: str, path: Path) -> None:
    """Write what a browser shows at an address."""
    page = browser.new_page(viewport=SIZE, color_scheme="light")
    page.goto(address)
    page.wait_for_timeout(WAIT_MS)
    page.screenshot(path=path)
    page.close()


def take(run: Path, folder: Path = PICTURES) -> None:
    """Write the screenshots of a demo: the page of its store, and its report."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        raise SystemExit("there is no Chromium; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        with closing(Store(run / "store", read_only=True)) as store:
            first = min(record.id for record in store.runs())
        with serving(run / "store", ViewConfig(port=0)) as address:
            capture(browser, f"{address}#run={first}&view=fleet", folder / "view.png")
        capture(browser, (run / "report.html").resolve().as_uri(), folder / "report.png")
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="Folder that `shoal demo` wrote.")
    take(parser.parse_args().run)
