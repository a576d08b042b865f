"""Pages for people who look something up name what the code has: versions, reasons, exit codes."""

import ast
import re
from pathlib import Path

import pytest
import tomllib

from broker_server.store import schema
from fleet_protocol import errors, manifest
from fleet_protocol.errors import RefusalReason, ShoalError
from fleet_protocol.messages.header import SCHEMA_VERSION
from models import layout
from tests.documents.typed import ROOT

DOCS = ROOT / "docs"
ZOO = ROOT / "models" / "zoo"


def test_the_upgrade_guide_has_the_versions_of_the_code():
    """Protocol, store, artifact sets and layouts of this version."""
    (row,) = re.findall(r"^\| (\d.*) \|$", (DOCS / "upgrade.md").read_text(), re.MULTILINE)
    version, protocol, store, sets, layouts = row.split(" | ")
    assert version == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert int(protocol) == SCHEMA_VERSION
    assert store.endswith(f"{schema.SCHEMA_VERSION}, {schema.SCHEMA_VERSION}")
    assert (int(sets), int(layouts)) == (manifest.FORMAT_VERSION, layout.FORMAT_VERSION)


def test_citation_and_changelog_have_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_reason_to_refuse_has_a_remedy():
    """On the page of symptoms; `failed` and `away` say themselves what they are."""
    named = set(re.findall(r"`([a-z-]+)`", (DOCS / "troubleshooting.md").read_text()))
    reasons = {reason.value for reason in RefusalReason} - {"failed", "away"}
    assert reasons - named == set()


def test_every_exit_code_is_explained():
    page = (DOCS / "troubleshooting.md").read_text().partition("## Exit codes")[2]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    used = {kind.exit_code for kind in kinds if issubclass(kind, ShoalError)}
    for package in ("broker_server", "device_runtime", "reproduction", "shoal", "simulation"):
        for path in (ROOT / package).rglob("*.py"):
            codes = re.findall(r"^ +exit_code = (\d+)$", path.read_text(), re.MULTILINE)
            used |= {int(code) for code in codes}
    assert {9, 130} < used
    assert used <= listed


def architectures() -> dict[str, Path]:
    """The architectures of the zoo, by the modules that define them."""
    found = {}
    for path in sorted(ZOO.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                if any(text.startswith("architecture(") for text in decorators):
                    found[node.name] = path
    return found


def test_the_page_of_the_zoo_lists_every_architecture():
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "zoo.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(architectures())
    assert len(rows) > 10


def test_documents_do_not_name_a_package_that_is_not_published():
    """Until a release exists, anybody could register the name."""
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md"]
    wrong = []
    for page in pages:
        if "reference" not in page.parts and page.name != "release.md":
            found = re.findall(r"pip install (?:-\S+ )*['\"]?shoal\b(?!-)", page.read_text())
            wrong += [(page.name, line) for line in found]
    assert wrong == []


@pytest.mark.parametrize(("name", "most_bytes"), [("README.md", 8 * 1024)])
def test_a_document_stays_short(name, most_bytes):
    assert len((ROOT / name).read_bytes()) <= most_bytes


def test_operations_and_changelog_stay_short():
    assert len((DOCS / "operations.md").read_text().split()) <= 2500
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 120


def test_the_counts_of_verdicts_are_those_of_the_results():
    """Wherever a page or the changelog repeats them."""
    page = (DOCS / "results" / "README.md").read_text()
    summary = re.search(
        r"\*\*(\d+) of (\d+) claims hold\*\*, (\d+) do not hold, (\d+) are undecided, "
        r"(\d+) are out of reach here, (\d+) are repeated in another table, and (\d+)",
        page,
    )
    assert summary is not None
    hold, claims, fail, undecided, unreachable, repeated, missing = summary.groups()
    changelog = " ".join((ROOT / "CHANGELOG.md").read_text().split())
    assert (
        f"{hold} of {claims} claims of the reproduced papers hold, {fail} do not, {undecided} are "
        f"undecided, {unreachable} are out of reach here, {repeated} are repeated in another table, "
        f"and {missing} have not been tested." in changelog
    )
    assert f"{hold} of {claims} hold" in (DOCS / "benchmarks" / "index.md").read_text()
    roadmap = (DOCS / "roadmap.md").read_text()
    assert (
        f"{undecided} of {claims} claims are undecided and {missing} have not been tested"
        in roadmap
    )
