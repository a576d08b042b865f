"""A run whose training another one has done takes its rounds, with the seconds of its own clock."""

import json
from dataclasses import replace

import pytest

from reproduction import retiming
from reproduction.retiming import rounds_with
from reproduction.running import TablePart, collect, jobs, run_job
from reproduction.stored import rows_of
from reproduction.table_file import find_experiment
from simulation.results.history import HistoryWriter, write_history
from simulation.results.rounds import DeviceRow
from simulation.runner import simulate
from tests.reproduction.test_rendering import row
from tests.reproduction.test_running import complete
from tests.simulation.simulations import settings

KINDS = {
    "count": 6,
    "types": [{"type": "Xavier", "link": 20.0}, {"type": "RaspberryPi4", "max_width": 0.5}],
}
STRONG = {
    "dynamics": {"loads": [1, 2, 4], "links": [80.0, 15.0]},
    "upload": "bytes",
    "download": False,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache):
    """Runs a simulation in a folder of its own."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name, **tables):
        config = settings(folder / name, cache, devices=KINDS, **tables)
        return config, simulate(config).rounds

    return run


@pytest.mark.parametrize(
    "train", [pytest.param({}, marks=pytest.mark.slow), {"steps": 4}], ids=["passes", "steps"]
)
@pytest.mark.slow
def test_only_the_seconds_of_a_round_depend_on_the_clock(trained, train):
    """What a run with another clock would have trained and taken, to the bit, without its
    training.
    """
    name = "-".join(["with", *train])
    static, _ = trained(f"{name}-static", train=train)
    strong, rounds = trained(f"{name}-strong", train=train, clock=STRONG)
    found = rounds_with(strong, static.out, static)
    assert [replace(row, seconds=0.0) for row in found] == [
        replace(row, seconds=0.0) for row in rounds
    ]
    assert len({row.simulated_seconds for row in found}) > 1
    choosing = settings(
        strong.out,
        strong.out,
        devices=KINDS,
        clock=STRONG,
        train=train,
        strategy={"name": "whalefl"},
    )
    assert rounds_with(choosing, static.out, static) == ()


@pytest.mark.parametrize(
    "tables",
    [
        {"round": {"over_selection": 1.0}},
        {"round": {"deadline_seconds": 1e6}},
        {"round": {"buffer": 2}},
        {"devices": {"count": 6, "types": [{"type": "Xavier", "dropout": 0.1}]}},
    ],
    ids=["over-selection", "deadline", "buffer", "drop-outs"],
)
def test_where_time_decides_who_takes_part_nothing_is_shared(tmp_path, tables, monkeypatch):
    """Even where each round of the one lasted as long as its slowest device."""
    monkeypatch.setattr(retiming, "_all_merged", lambda _folder: True)
    config, free = (settings(tmp_path / "out", tmp_path, **keys) for keys in (tables, {}))
    device = DeviceRow(1, config.devices.ids[0], "w1.00-d1", 40, 0.5, None, 1.0, 1.0, 1000)
    with HistoryWriter(config.out) as history:
        history.add(row(1), [device])
    strong = {"clock": settings(tmp_path, tmp_path, clock=STRONG).clock}
    for trained, shared in ((config, 0), (free, 1)):
        (seconds,) = retiming._seconds(trained, config.out)
        write_history(config.out, [replace(row(1), simulated_seconds=seconds)])
        assert len(rounds_with(trained.model_copy(update=strong), config.out, trained)) == shared


def test_rounds_that_waited_for_a_refused_update_are_not_those_of_another_clock(trained):
    """The round took as long as that device, too, of which its parts do not tell: it had been
    shorter than its own.
    """
    config, rounds = trained("refused", robust={"norm_bound": 1.02})
    other = config.model_copy(
        update={"clock": settings(config.out, config.out, clock=STRONG).clock}
    )
    assert sum(row.devices for row in rounds) < 3 * len(rounds)
    assert rounds_with(other, config.out, config) == ()
    assert rounds_with(config, config.out, config) == rounds


@pytest.mark.slow
def test_rounds_that_end_by_time_are_not_those_of_another_clock(trained):
    """Where a deadline leaves somebody out, another clock would leave out others."""
    _, everybody = trained("everybody")
    longest = max(row.simulated_seconds for row in everybody)
    rule = {"deadline_seconds": 0.7 * longest, "min_devices": 1, "quorum": 0.1}
    config, rounds = trained("deadline", round=rule)
    assert min(row.devices for row in rounds) < 3
    other = config.model_copy(
        update={"clock": settings(config.out, config.out, clock=STRONG).clock}
    )
    assert rounds_with(other, config.out, config) == ()
    assert rounds_with(config, config.out, config) == rounds


def test_a_table_takes_what_another_has_trained(tmp_path, monkeypatch):
    """Said in its figures; a damaged result elsewhere, or one that took its own rounds elsewhere,
    is passed over.
    """
    part = TablePart((3,), ("heterofl/iid",))
    (strong,), (mild,), (static,) = (
        jobs(find_experiment(f"whalefl-{name}"), "small", tmp_path, part)
        for name in ("strong", "mild", "static")
    )
    complete(strong, [row(1, 0.5, total=9.0)])
    damaged = tmp_path / "fml-1" / "small" / "an-arm" / "seed-3" / "result.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    asked = []
    rounds = (row(1, 0.5, total=4.0),)
    monkeypatch.setattr(
        "reproduction.running.rounds_with", lambda _job, run, _config: asked.append(run) or rounds
    )
    run_job(mild, stage=pytest.fail)
    run_job(static, stage=pytest.fail)
    assert asked == [strong.config.out] * 2
    assert mild.complete
    (found,) = collect(find_experiment("whalefl-mild"), "small", tmp_path)
    assert found.rows == rounds
    (figure, *_) = rows_of(find_experiment("whalefl-mild"), "small", [found])
    assert figure.engine == "local, onnx, trained as whalefl-strong, heterofl/iid"
    assert json.loads((mild.config.out / "result.json").read_text())["table"] == "whalefl-mild"


def test_who_takes_rounds_of_the_same_clock_takes_the_widths(tmp_path):
    """Where devices choose; they had been missing in the curves, and in their plot."""
    names = [("whalefl-1", "whalefl/non-iid-2"), ("whalefl-static", "released/non-iid-2")]
    first, second = (
        jobs(find_experiment(table), "small", tmp_path, TablePart((3,), (arm,)))[0]
        for table, arm in names
    )
    complete(first, [])
    with HistoryWriter(first.config.out) as writer:
        writer.add(row(1, 0.5), [part("device-07", "w0.50-d1", 1)])
    run_job(second, stage=pytest.fail)
    (found,) = collect(find_experiment("whalefl-static"), "small", tmp_path)
    assert found.trained == "whalefl-1, whalefl/non-iid-2"
    assert found.widths[1][7] == 0.5


def test_what_is_trained_otherwise_is_trained(tmp_path, monkeypatch):
    """Another seed, another arm, or a run that was begun: nothing is taken."""
    done, other_seed, other_arm, begun = (
        jobs(find_experiment(f"whalefl-{table}"), "small", tmp_path, TablePart((seed,), (arm,)))[0]
        for table, seed, arm in [
            ("strong", 3, "heterofl/iid"),
            ("mild", 4, "heterofl/iid"),
            ("mild", 3, "heterofl/iid/other"),
            ("mild", 3, "heterofl/iid"),
        ]
    )
    complete(done, [row(1, 0.5)])
    begun.config.out.mkdir(parents=True)
    started = []
    monkeypatch.setattr(
        "simulation.runner.simulate", lambda config, **_: started.append(config.out) or 1 / 0
    )
    for job in (other_seed, other_arm, begun):
        with pytest.raises(ZeroDivisionError):
            run_job(job)
    assert started == [job.config.out for job in (other_seed, other_arm, begun)]


def test_widths_are_found_in_what_every_device_did(tmp_path):
    """Of a stored run whose devices choose, and of no other; who did not take part has none."""
    experiment = find_experiment("whalefl-strong")
    chosen, fixed = jobs(
        experiment, "small", tmp_path, TablePart((3,), ("whalefl/iid", "heterofl/iid"))
    )
    for job in (chosen, fixed):
        complete(job, [])
        with HistoryWriter(job.config.out) as writer:
            writer.add(
                row(1, 0.5), [part("device-07", "w0.50-d1", 1), part("device-00", "w1.00-d1", 1)]
            )
            writer.add(row(2, 0.6), [part("device-19", "w0.12-d1", 2)])
    first, second = collect(experiment, "small", tmp_path)
    assert (first.arm.name, second.arm.name) == ("whalefl/iid", "heterofl/iid")
    widths = {
        number: {at: width for at, width in enumerate(row) if width}
        for number, row in first.widths.items()
    }
    assert widths == {1: {0: 1.0, 7: 0.5}, 2: {19: pytest.approx(0.125, abs=0.006)}}
    assert {len(row) for row in first.widths.values()} == {20}
    assert second.widths == {}


def part(device, tier, number):
    return DeviceRow(
        round=number,
        device=device,
        tier=tier,
        examples=10,
        train_loss=0.5,
        local_accuracy=None,
        simulated_seconds=1.0,
        seconds=1.0,
        payload_bytes=10,
    )
