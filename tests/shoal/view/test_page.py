"""The page in a real browser: what it says, what it refuses to run, whom it shuts out, and how it
fits.
"""

import json
import os
import re
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, quote_plus

import numpy as np
import pytest
from sqlalchemy import insert, select, text, update

pytest.importorskip("fastapi")

from broker_server.settings.fleet import ViewConfig
from broker_server.store import Store, queries, schema
from broker_server.store.rows import to_row
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import DeviceProfile
from fleet_protocol.weights import encode_weights
from shoal.cli.console import flat
from shoal.view.serving import serving
from tests.broker_server.peer import profile
from tests.brokers import free_port
from tests.shoal.view.stores import HOSTILE, RUN, TIERS, made

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
AXE = Path(__file__).parents[2] / "vendor" / "axe.min.js"
RESULTS = Path(__file__).parents[3] / "docs" / "results"
OTHER = "20260102-000000-other"
PATIENCE = 60_000  # milliseconds: other tests run beside this one
VIEWS = [
    "",
    "view=run",
    "view=round&round=2",
    "view=device&device=pi-0000",
    "view=coverage",
    "view=models",
    f"view=methods&with={OTHER}",
    "view=artifacts",
    "view=rollouts",
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="there is no Chromium; on Debian: apt-get install chromium"
    ),
]


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=flags)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    store = made(tmp_path_factory.mktemp("fleet"), hostile=True)
    beside(store)
    with serving(store, ViewConfig(port=0)) as address:
        yield address


def beside(store):
    """Another run, begun before, that ended with half the accuracies, by another method."""
    with closing(Store(store)) as opened:
        run = opened.runs()[0]
        rounds = [record for record in opened.rounds(RUN) if record.evaluation]
        config = json.dumps({**json.loads(run.config), "strategy": {"name": "heterofl"}})
        halves = [
            replace(
                record,
                run=OTHER,
                evaluation=record.evaluation.model_copy(
                    update={"accuracy": record.evaluation.accuracy / 2}
                ),
            )
            for record in rounds
        ]
        old = replace(
            run,
            id=OTHER,
            config=config,
            status="finished",
            created_at=run.created_at - 9,
            ended_at=1.0,
        )
        opened.add_run(old, replace(opened.versions(RUN)[0], run=OTHER))
        with opened._begin() as connection:
            connection.execute(insert(schema.rounds), [to_row(record) for record in halves])
            connection.execute(
                text("update runs set rowid = 0 where id = :run"), {"run": OTHER}
            )  # the newest is last


@pytest.fixture
def opened(browser):
    """Open a page; what it complains of, and what it asks of others, fails the test."""
    complaints = []
    pages = []

    def make(address, **given):
        page = browser.new_page(**given)
        page.set_default_timeout(PATIENCE)
        page.on(
            "console",
            lambda said: (
                complaints.append(said.text) if said.type in {"error", "warning"} else None
            ),
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith((address, "data:")) else complaints.append(asked.url)
            ),
        )
        page.add_init_script(path=AXE)
        page.goto(address)
        page.get_by_role("status").get_by_text("live", exact=True).wait_for()
        pages.append(page)
        return page

    make.complaints = complaints
    yield make
    for page in pages:
        page.close()
    assert complaints == []


def show(page, view):
    """Go somewhere, and wait until it is drawn and still."""
    page.evaluate("view => { location.hash = view }", view)
    page.locator(f'main[data-shown="{view}"] section').first.wait_for()
    page.wait_for_timeout(300)  # charts are drawn with the next frame


def test_a_page_comes_back_after_a_proxy_said_no(fleet, browser):
    """A browser asks no more for what was answered with an error; what nobody knows has a heading
    of its own.
    """
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.route("**/api/v1/events?*", lambda route: route.fulfill(status=502))
    page.goto(f"{fleet}#view=constructor")
    page.get_by_role("status").get_by_text("the server does not answer", exact=True).wait_for()
    page.unroute("**/api/v1/events?*")
    page.get_by_role("status").get_by_text("live", exact=True).wait_for()
    assert page.locator("#title").text_content() == "Fleet"
    page.evaluate("location.hash = 'view=round&round=999'")
    page.get_by_text("has no round 999").wait_for()
    assert page.locator("#title").text_content() == "Not found"
    page.close()


def test_a_page_keeps_what_it_shows_while_its_server_is_away(browser, tmp_path):
    """It neither says that the view was not found, nor has to be loaded again."""
    settings = ViewConfig(port=free_port())
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    status = page.get_by_role("status")
    store = made(tmp_path)
    with serving(store, settings) as address:
        page.goto(address)
        status.get_by_text("live", exact=True).wait_for()
        device = page.get_by_role("link", name="pi-0000")
        device.wait_for()
    status.get_by_text("the server does not answer", exact=True).wait_for()
    page.evaluate("location.hash = 'view=round&round=2'")
    page.wait_for_timeout(500)
    assert page.locator("#title").text_content() == "Fleet"
    assert device.is_visible()
    with serving(store, settings):
        status.get_by_text("live", exact=True).wait_for()
        page.locator('main[data-shown="view=round&round=2"]').wait_for()
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_open_to_everybody_and_fits(fleet, opened, scheme):
    """No violation of axe-core's rules, nothing wider than the window, at the width of a phone and
    of a desk.
    """
    for width in (390, 1280):
        page = opened(fleet, viewport={"width": width, "height": 900}, color_scheme=scheme)
        for view in VIEWS:
            show(page, view)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (view, width)
            violations = page.evaluate("axe.run().then(found => found.violations)")
            assert [
                (violation["id"], violation["nodes"][0]["html"]) for violation in violations
            ] == [], (view, width)


def _answer_with_a_hostile_name(route):
    """The server's answer, in which a device has another name."""
    url = route.request.url
    for encoded in (quote(HOSTILE, safe="()"), quote_plus(HOSTILE)):
        url = url.replace(encoded, "pi-0001")
    answer = route.fetch(url=url)
    route.fulfill(response=answer, body=answer.text().replace("pi-0001", HOSTILE))


@pytest.mark.attack(
    "page user",
    "Names a device so that the page would run a script",
    "the page shows the name as text",
    "2026-11-22",
)
def test_names_and_logs_are_text(fleet, opened):
    """Markup that a device calls itself, or writes into the log, is shown letter by letter and
    never read.

    No store of this server has a device of such a name; the page of another may.
    """
    page = opened(fleet)
    page.route(re.compile(r"/api/v1/(?!events)"), _answer_with_a_hostile_name)
    page.reload()
    page.get_by_role("link", name=HOSTILE).wait_for()
    assert page.get_by_role("link", name=HOSTILE).count() == 2 - 1
    assert page.get_by_text(f"{HOSTILE} asked").is_visible()
    page.get_by_role("link", name=HOSTILE).click()
    page.get_by_role("heading", name=HOSTILE, level=1).wait_for()
    show(page, "view=coverage")
    page.get_by_label("Device").select_option(HOSTILE)
    page.get_by_text(f"Device {HOSTILE}").first.wait_for()
    page.unroute_all(behavior="ignoreErrors")
    assert page.locator("img").count() == 0


def test_it_says_who_learns_who_does_not_and_what_to_do(fleet, opened):
    """Reasons and remedies beside the devices, rules with their evidence, and the coverage of each
    tier in words.
    """
    page = opened(fleet)
    row = page.get_by_role("row", name="pi-0004").first
    assert "offline" in row.inner_text()
    assert "shoal device doctor" in row.inner_text()
    page.get_by_text("The model is much worse on some devices than on others").wait_for()
    titles = page.get_by_role("heading", level=2).all_inner_texts()
    assert titles.index("What to do next") < titles.index("Devices")
    assert f"({TIERS[1]}) reaches 0.5000" in page.get_by_text("On its own samples").inner_text()
    show(page, "view=coverage")
    assert (
        page.get_by_role("img", name=f"Tier {TIERS[1]}: ")
        .get_attribute("aria-label")
        .count("of 8 units")
        == 2
    )
    page.get_by_label("Up to round").fill("1")
    page.get_by_text("50 % of 16 coordinates covered by").first.wait_for()
    show(page, "view=models")
    shares = page.get_by_role("region", name="The share of each label's samples").get_by_role("row")
    assert [row.inner_text().split("\t") for row in shares.all()[1:3]] == [
        ["0", "0.7833"],
        ["1", "0.7750"],
    ]
    tiers = (
        page.get_by_role("region", name="The newest evaluated version").get_by_role("row").all()[1:]
    )
    assert [row.inner_text().split("\t")[:5] for row in tiers] == [
        [TIERS[0], "2", "0.7800", "0.9000", "0.9000 to 0.9000"],
        [TIERS[1], "4", "0.6800", "0.5000", "0.5000 to 0.5000"],
    ]
    show(page, "view=device&device=pi-0000")
    assert page.get_by_role("region", name="Readings").get_by_text("not measured").count() == 2
    strip = page.get_by_role("img", name="Of 4 ended rounds: ")
    asked = strip.get_attribute("aria-label")
    states = [cell.get_attribute("class") for cell in strip.locator("i").all()]
    assert len(states) == 4
    for kind, words in (("good", "merged"), ("bad", "missed"), ("none", "not asked")):
        assert f"{states.count(kind)} {words}" in asked or kind not in states
    show(page, "view=run")
    assert "whole model: 0.6000 at first" in page.get_by_role("img", name="Accuracy").get_attribute(
        "aria-label"
    )


def test_the_log_is_filtered_by_the_server(tmp_path, opened):
    """What an operator did is found behind more lines than the page reads."""
    store = made(tmp_path)
    with closing(Store(store)) as written:
        written.log("promoted", "version 2 is the one to use", run=RUN)
        for number in range(300):
            written.log("update-received", f"1.2 MB, number {number}", run=RUN, device="pi-0001")
    with serving(store, ViewConfig(port=0)) as address:
        page = opened(address)
        page.get_by_text("1.2 MB, number 299").wait_for()
        assert page.get_by_text("version 2 is the one to use").count() == 0
        page.get_by_label("Show").select_option("actions of operators")
        page.get_by_text("version 2 is the one to use").wait_for()
        assert page.get_by_text("1.2 MB").count() == 0
        page.get_by_text("but no server is using its store").wait_for()
        page.get_by_text("as of ").wait_for()


def test_curves_end_with_the_round_that_ended(tmp_path, opened):
    """The round in progress, of which one device has answered, is in the table and in no curve."""
    store = made(tmp_path)
    with closing(Store(store)) as written, written._begin() as connection:
        metrics = json.loads(
            connection.execute(
                select(schema.tasks.c.metrics).where(schema.tasks.c.phase == "merged")
            )
            .scalars()
            .first()
        )
        metrics["evaluation"]["accuracy"] = 0.0625
        in_progress = update(schema.tasks).where(schema.tasks.c.round == 5)
        connection.execute(in_progress.values(phase="received", metrics=json.dumps(metrics)))
    with serving(store, ViewConfig(port=0)) as address:
        page = opened(address)
        show(page, "view=run")
        words = page.get_by_role("img", name="Accuracy of the merged model, over 4 rounds")
        words.wait_for()
        assert "0.0625" not in words.get_attribute("aria-label")
        page.get_by_role("region", name="Newest first").get_by_role("link", name="5").wait_for()


def test_what_looks_wrong_in_a_boards_data_is_said(tmp_path, opened):
    """On the page of the device and among what to do next, as text."""
    store = made(tmp_path)
    findings = (
        "values range from 0 to 255, but the fleet's range from 0 to 1",
        "column '<b>bold</b>' is 7",
    )
    with closing(Store(store)) as written:
        written.record_device(
            DeviceProfile(fleet="lab", device="pi-0000", profile=profile(findings=findings))
        )
        written.flush()
    with serving(store, ViewConfig(port=0)) as address:
        page = opened(address)
        page.get_by_text("devices may be faulty").first.wait_for()
        show(page, "view=device&device=pi-0000")
        for finding in findings:
            page.get_by_text(f"Its data looks wrong: {finding}.").wait_for()
        show(page, "view=device&device=pi-0001")
        assert page.get_by_text("Its data looks wrong").count() == 0


def test_a_version_is_downloaded_or_it_is_said_why_not(tmp_path, opened):
    """In the page's own words, with the file that the command would write, and the spread between
    devices beside it.
    """
    store = made(tmp_path)
    weights = encode_weights({"w": np.arange(2, dtype=np.float32)})
    digest = BlobStore(store / "blobs").put(weights)
    with closing(Store(store)) as written, written._begin() as connection:
        connection.execute(
            update(schema.versions).where(schema.versions.c.number == 2).values(digest=digest)
        )
    with serving(store, ViewConfig(port=0, actions=True)) as address:
        page = opened(address)
        show(page, "view=models")
        page.get_by_text("operators download it here").wait_for()
        assert page.get_by_role("button", name="Download").count() == 0
        page.get_by_role("button", name="Act as operator").click()
        page.get_by_label("Token").fill((store / "operator.token").read_text().strip())
        page.get_by_role("button", name="Log in").click()
        page.get_by_text("You act as operator").wait_for()
        page.get_by_label("Actions of version 2", exact=True).click()
        page.get_by_role("button", name="Download as ONNX, version 2").wait_for()
        page.get_by_role("region", name="Newest first").get_by_text("0.5000 to 0.").first.wait_for()
        row = page.get_by_role("region", name="Newest first").get_by_role("row").all()[-3]
        assert row.inner_text().split("\t")[0] == "2"
        assert re.search(r"0\.5000 to 0\.\d000\t\d+ B\t\s*Actions", row.inner_text())
        with page.expect_download() as taken:
            page.get_by_role("button", name="Download as safetensors, version 2").click()
        assert taken.value.suggested_filename == "model-2.safetensors"
        assert tensors_in(Path(taken.value.path()).read_bytes())["w"].tolist() == [0, 1]
        page.locator("#said").get_by_text("Written: model-2.safetensors.").wait_for()
        page.get_by_role("button", name="Download as ONNX, version 2").click()
        page.locator("#said").get_by_text("Not written: ").wait_for()
        page.close()
        opened.complaints[:] = [
            text for text in opened.complaints if "404" not in text and "503" not in text
        ]


def test_a_keyboard_reaches_everything(fleet, opened):
    """From the skip link to the views, and a table that scrolls takes the focus."""
    page = opened(fleet)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Run", level=1).wait_for()
    assert page.get_by_role("region", name="Newest first").first.get_attribute("tabindex") == "0"


def test_what_is_written_meanwhile_appears(tmp_path, opened):
    """A store without a run, then with a line in its log; an unknown run is said, and the way back
    stays.
    """
    store = tmp_path / "store"
    Store(store).close()
    with serving(store, ViewConfig(port=0)) as address:
        page = opened(address)
        page.get_by_text("No run yet.").wait_for()
        with closing(Store(store)) as writer:
            writer.log("said", "after the page was opened")
        page.get_by_text("after the page was opened").wait_for()


def test_what_is_judged_beside_the_next_round_appears(tmp_path, opened):
    """A page that saw the round end without its accuracy asks again."""
    store = made(tmp_path, rounds=3)
    with closing(Store(store)) as writing, serving(store, ViewConfig(port=0)) as address:
        judged = writing.rounds(RUN)[2].evaluation

        def say(found):
            with writing._begin() as connection:
                stored = None if found is None else found.model_dump_json()
                connection.execute(
                    update(schema.rounds)
                    .where(schema.rounds.c.number == 3)
                    .values(evaluation=stored)
                )

        say(None)
        page = opened(address)
        show(page, "view=run")
        row = page.get_by_role("region", name="Rounds").get_by_role("row").nth(2)
        assert row.inner_text().split("\t")[0] == "3"
        assert f"{judged.accuracy:.4f}" not in row.inner_text()
        say(judged)
        row.get_by_text(f"{judged.accuracy:.4f}").wait_for()


def test_without_the_token_there_is_nothing_to_see(fleet, browser, tmp_path):
    """A wrong one is refused, the right one lets in, and stays."""
    store = made(tmp_path)
    with serving(store, ViewConfig(port=0), tmp_path / "token") as address:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(address)
        for token in ("wrong", (tmp_path / "token").read_text().strip()):
            page.get_by_label("Token").fill(token)
            page.get_by_role("button", name="Log in").click()
            if token == "wrong":
                page.get_by_text("this is not the server's token").wait_for()
                assert page.locator("table").count() == 0
        page.get_by_role("heading", name="Devices").wait_for()
        page.reload()
        page.get_by_role("heading", name="Devices").wait_for()
        page.goto(f"{address}#run=nothing")
        page.get_by_role("alert").get_by_text("has no run nothing").wait_for()
        page.close()


def test_a_thousand_devices_and_five_hundred_rounds(tmp_path, opened, capsys):
    """Weight, first paint, and time to handle an update; printed, for docs/page.md."""
    store = made(tmp_path, devices=1000, rounds=500, asked=100)
    weight = sum(
        path.stat().st_size
        for path in (Path(__file__).parents[3] / "shoal/view/static").rglob("*.*")
    )
    with serving(store, ViewConfig(port=0)) as address:
        page = opened(address)
        there = page.evaluate(
            "performance.getEntriesByName('update').map(entry => entry.startTime + "
            "entry.duration)[0]"
        )
        painted = page.evaluate(
            "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        page.get_by_text("500 of 502").wait_for()
        page.evaluate("performance.clearMeasures()")
        for number in range(5):
            with closing(Store(store)) as writer:
                writer.log("said", f"update {number}", run=RUN)
            page.get_by_text(f"update {number}").wait_for()
        updates = page.evaluate(
            "performance.getEntriesByName('update').map(entry => Math.round(entry.duration))"
        )
    with capsys.disabled():
        print(
            f"\nweight {weight}, first paint {painted:.0f} ms, fleet {there:.0f} ms, updates "
            f"{updates}"
        )
    assert weight <= 400_000
    assert painted <= 15_000
    assert updates
    assert min(updates) <= 500


def test_an_operator_acts_once_it_is_confirmed(tmp_path, opened):
    """No button before the login; a question answered with no does nothing; what was done, or why
    not, is said.
    """
    store = made(tmp_path)
    asked = []
    digest = BlobStore(store / "blobs").put(encode_weights({"w": np.zeros(2, np.float32)}))
    with closing(Store(store)) as written, written._begin() as connection:
        connection.execute(
            update(schema.versions).where(schema.versions.c.number == 2).values(digest=digest)
        )
    with serving(
        store, ViewConfig(port=0, actions=True), steer=lambda *wanted: asked.append(wanted) or RUN
    ) as address:
        page = opened(address)
        show(page, "view=models")
        assert page.get_by_role("button", name="Promote").count() == 0
        page.get_by_role("button", name="Act as operator").click()
        page.get_by_label("Token").fill((store / "operator.token").read_text().strip())
        page.get_by_role("button", name="Log in").click()
        for width, scheme in ((390, "light"), (1280, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            for view in ("view=run", "view=models"):
                show(page, view)
                is_closed = page.get_by_role("button", name="Promote").count() == 0
                if view == "view=models" and is_closed:
                    page.get_by_label("Actions of version 2", exact=True).click()
                page.get_by_role(
                    "button", name="Promote" if view == "view=models" else "Pause"
                ).wait_for()
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (view, width)
                violations = page.evaluate("axe.run().then(found => found.violations)")
                assert [
                    (violation["id"], violation["nodes"][0]["html"]) for violation in violations
                ] == [], (
                    view,
                    width,
                )
        for verb, answer, notice in (
            ("Promote", "dismiss", ""),
            ("Promote", "accept", "Done: promote 2."),
            ("Roll back", "accept", "is in progress; hold it with"),
        ):
            page.once("dialog", lambda dialog, answer=answer: getattr(dialog, answer)())
            if not page.get_by_role("button", name=verb).is_visible():
                page.get_by_label("Actions of version 2", exact=True).click()
            page.get_by_role("button", name=verb).click()
            if notice:
                page.locator("#said").get_by_text(notice).wait_for()
            else:
                assert page.locator("#said").inner_text() == ""
        show(page, "view=run")
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Pause").click()
        page.locator("#said").get_by_text("Done: pause.").wait_for()
        show(page, "")
        page.get_by_text("promote 2, on the page, from 127.0.0.1").first.wait_for()
        assert asked == [("pause", RUN)]
        page.close()  # it would look for a server that ends
        opened.complaints[:] = [
            text for text in opened.complaints if "409" not in text
        ]  # the refusal, by Chromium


def test_a_release_is_followed_and_stopped(tmp_path, opened):
    """Its stages, its boards with the reasons, and those before it; to stop it takes a login and a
    yes.
    """
    store = made(tmp_path, devices=8)
    with serving(store, ViewConfig(port=0, actions=True)) as address:
        page = opened(address)
        show(page, "view=rollouts")
        stages = page.get_by_role("region", name="A stage begins when").get_by_role("row").all()[1:]
        assert [row.inner_text().split("\t")[2:] for row in stages] == [
            ["1", "over"],
            ["4", "over"],
            ["8", "waits"],
        ]
        boards = (
            page.get_by_role("region", name="All boards that accept releases")
            .get_by_role("row")
            .all()[1:]
        )
        assert boards[0].inner_text().split("\t")[:3] == [
            "pi-0002",
            "failed",
            "its self-test failed: no numpy",
        ]
        assert (
            sorted(row.inner_text().split("\t")[1] for row in boards)
            == ["failed"] * 2 + ["not asked"] * 4 + ["running"] * 2
        )
        page.get_by_text("1 board", exact=True).click()
        page.get_by_text(f"pi-0001 failed: {HOSTILE}").wait_for()
        assert page.get_by_role("button", name="Stop").count() == page.locator("img").count() == 0
        page.get_by_role("button", name="Act as operator").click()
        page.get_by_label("Token").fill((store / "operator.token").read_text().strip())
        page.get_by_role("button", name="Log in").click()
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Stop").click()
        page.locator("#said").get_by_text("Done: stop the rollout of release 8.").wait_for()
        page.get_by_text("Stopped: the operator stopped it.").wait_for()
        assert page.get_by_role("button", name="Stop").count() == 0


def test_results_without_a_run_show_their_tables(tmp_path, opened):
    """Every arm beside what was published, before the first run has begun, and nothing that needs
    one.
    """
    shutil.copytree(RESULTS / "fedrolex-3" / "earlier-1", tmp_path / "fedrolex-3" / "small")
    small = tmp_path / "fedrolex-3" / "small"
    with (small / "fedrolex-3.csv").open("a") as table:
        table.write(
            'fedrolex-3,small,never/reaches,hours-90,h,1.5,,1,,,,150,1,1,,"local, onnx",x,\n'
        )
    with (small / "fedrolex-3.md").open("a") as report:
        report.write("\n**digits stands for cifar10: published figures are not about it.**\n")
    store = small / "arm" / "seed-1" / "store"
    Store(store).close()
    with serving(store, ViewConfig(port=0)) as address:
        page = opened(address)
        show(page, "view=methods")
        arms = page.get_by_role("region", name="Arms of the tables")
        row = arms.get_by_role("row", name="federated-dropout/cifar10-high")
        assert "fedrolex-3/small/fedrolex-3.csv" in row.first.inner_text()
        page.get_by_text("digits stands for cifar10: published figures").wait_for()
        never = arms.get_by_role("row", name="never/reaches").inner_text().split("\t")
        assert "not reached" in never
        assert "0.00 %" not in never
        page.get_by_label("Draw federated-dropout/cifar10-high, global").check()
        page.get_by_role(
            "img", name="federated-dropout/cifar10-high, published: 0.4664 at first"
        ).wait_for()
        assert page.evaluate("axe.run().then(found => found.violations.map(item => item.id))") == []
        show(page, "view=run")
        page.get_by_text("No run yet.").wait_for()
        show(page, "view=rollouts")
        page.get_by_text("No release yet.").wait_for()
        page.close()


def test_methods_stand_side_by_side(fleet, opened, tmp_path):
    """Runs of the store, rounds of another one, and published values on one chart, which says the
    same in words.
    """
    page = opened(fleet)
    show(page, "view=methods")
    page.get_by_label(f"heterofl {OTHER}").check()
    chart = page.get_by_role("img", name="Accuracy over rounds")
    summary = re.compile(
        rf"fedrolex {RUN}: 0\.6000 at first, 0\.7800 at last.*heterofl {OTHER}: 0\.3000 at first, "
        rf"0\.3900 at last"
    )
    page.get_by_role("img", name=summary).wait_for()
    assert OTHER in page.evaluate("document.activeElement.id")  # whoever chooses keeps his place
    row = page.get_by_role("region", name="Selected runs").get_by_role("row", name=OTHER)
    assert row.inner_text().split("\t")[2:5] == ["4", "0.3900", "0.3900"]
    settings = page.get_by_role("region", name="Differing settings").get_by_role("row").all()[1:]
    assert ["strategy.name", '"fedrolex"', '"heterofl"'] in [
        entry.inner_text().split("\t") for entry in settings
    ]
    assert all(entry.inner_text().startswith("strategy.") for entry in settings)
    with closing(Store(made(tmp_path), read_only=True)) as other_store:
        rounds = flat(queries.to_json_values(queries.rounds(other_store, last=2, tasks=False)))
    for entry in rounds:
        entry["round.evaluation.accuracy"] = 0.25
    (tmp_path / "rounds.json").write_text(json.dumps(rounds))
    (tmp_path / "nothing.csv").write_text(f"a,b\n{HOSTILE},2\n")
    page.get_by_label("Open").set_input_files(
        [tmp_path / "rounds.json", RESULTS / "fedrolex-3" / "earlier-1" / "fedrolex-3.csv"]
    )
    page.get_by_role("img", name="rounds.json: 0.2500 at first").wait_for()
    page.get_by_label("Draw federated-dropout/cifar10-high, global").check()
    page.get_by_role(
        "img", name="federated-dropout/cifar10-high, published: 0.4664 at first"
    ).wait_for()
    arm = (
        page.get_by_role("region", name="Arms of the tables")
        .get_by_role("row", name="federated-dropout/cifar10-high")
        .first
    )
    assert arm.inner_text().split("\t")[-5:-2] == [
        "3",
        "46.64 ± 3.05 %",
        "-25.86",
    ]  # of the last rounds, as the table
    page.get_by_label("Open").set_input_files(tmp_path / "nothing.csv")
    page.get_by_text("Cannot show nothing.csv: it contains neither").wait_for()
    for width, scheme in ((390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(500)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, width
        violations = page.evaluate("axe.run().then(found => found.violations)")
        assert [(entry["id"], entry["nodes"][0]["html"]) for entry in violations] == [], (
            width,
            scheme,
        )
    page.get_by_role("button", name="Close rounds.json").click()
    page.get_by_role("img", name="rounds.json").wait_for(state="detached")
    page.get_by_role("combobox", name="Show").select_option("loss")
    page.get_by_role("combobox", name="over").select_option("bytes so far")
    page.get_by_role("img", name="Loss over bytes so far").wait_for()
    assert chart.count() == 0
