"""A board trains when its operator wants: each condition, its two limits, and what the fleet
hears.
"""

from itertools import takewhile

import numpy as np
import pytest

from device_runtime import conditions as module
from device_runtime import doctor
from device_runtime.board import charge, on_battery, temperature
from device_runtime.conditions import CONDITIONS, CheckCounters, ConditionsConfig, ConditionWatch
from device_runtime.settings import load_device_config
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import ConfigError, RefusalReason
from fleet_protocol.messages import Done, Progress, Refuse
from tests.brokers import any_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.device_runtime.fake_system import FakeSystem
from tests.device_runtime.scripted_server import scripted_server
from tests.device_runtime.tiny_set import initial_weights, samples, write_tiny_set

EVERYTHING = {
    "mains": True,
    "battery": (0.3, 0.5),
    "celsius": (80, 70),
    "unthrottled": True,
    "load": (0.5, 0.3),
    "memory_pressure": (0.2, 0.1),
    "cpu_pressure": (0.9, 0.5),
    "io_pressure": (0.3, 0.2),
    "new_data": 100,
    "quiet_hours": ("22:00-06:30",),
    "metered": ("wwan*",),
}


@pytest.fixture
def system(tmp_path):
    """A board that is well in every respect."""
    fake = FakeSystem(tmp_path / "root")
    fake.battery("Charging", 90)
    fake.celsius(50)
    fake.firmware("50000")  # it was throttled once, and is not now
    fake.cooling(0)
    fake.processors(busy=10**6, idle=10**9)
    fake.route(eth0=100, wwan0=700)
    for resource in ("memory", "cpu", "io"):
        fake.pressure(resource, 3.21)
    return fake


@pytest.fixture
def noon(monkeypatch):
    """The board's clock."""
    monkeypatch.setattr(
        module.time, "strftime", lambda form: form.replace("%H:%M", "12:00").replace("%Z", "CET")
    )


def written(folder, rules):
    """A device.toml with conditions."""
    text = 'fleet="f"\ndevice="d"\nbroker="mqtt://127.0.0.1"\nstate_dir="s"\n[data]\nkind="npz"\npath="d.npz"\n'
    config = folder / "device.toml"
    config.write_text(f"{text}[conditions]\n{rules}\n")
    return config


def seen(system, **rules):
    watch = ConditionWatch(
        ConditionsConfig.model_validate((rules or EVERYTHING) | {"root": system.root})
    )
    watch.check(0.0)
    return watch.readings


def reasons(system, **rules):
    return {key: reading.reason for key, reading in seen(system, **rules).items() if reading.reason}


@pytest.mark.usefixtures("noon")
def test_a_board_that_is_well(system):
    """Every condition of the table is asked, holds, and says what it has read."""
    readings = seen(system)
    assert set(readings) == set(CONDITIONS) == set(EVERYTHING)
    assert reasons(system) == {}
    assert {key: reading.text for key, reading in readings.items()} == {
        "mains": "no battery discharges",
        "battery": "the battery: 90%",
        "celsius": "the temperature: 50 °C",
        "unthrottled": "full speed",
        "load": "the load of other programs: 0%",
        "memory_pressure": "the wait for memory: 3%",
        "cpu_pressure": "the wait for cpu: 3%",
        "io_pressure": "the wait for io: 3%",
        "new_data": "counted by the agent",
        "quiet_hours": "12:00 CET",
        "metered": "eth0",
    }


@pytest.mark.usefixtures("noon")
@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        (
            lambda s: s.battery("Discharging", 90),
            "mains",
            "it runs on its battery; it continues with mains power",
        ),
        (
            lambda s: s.battery("Charging", 29),
            "battery",
            "the battery fell below 30%; it continues at 50%",
        ),
        (
            lambda s: s.celsius(81),
            "celsius",
            "the temperature rose above 80 °C; it continues at 70 °C",
        ),
        (lambda s: s.firmware("0x50005"), "unthrottled", "its processor is slowed down"),
        (lambda s: s.cooling(2), "unthrottled", "its processor is slowed down"),
        (
            lambda s: s.route(eth0=100, wwan0=50),
            "metered",
            "it is on the metered network wwan0",
        ),
        (
            lambda s: s.pressure("memory", 20.5),
            "memory_pressure",
            "the wait for memory rose above 20%; it continues at 10%",
        ),
        (
            lambda s: s.pressure("cpu", 91.0),
            "cpu_pressure",
            "the wait for cpu rose above 90%; it continues at 50%",
        ),
        (
            lambda s: s.pressure("io", 100.0),
            "io_pressure",
            "the wait for io rose above 30%; it continues at 20%",
        ),
        (
            lambda s: s.processors(busy=6, idle=4),
            "load",
            "the load of other programs rose above 50%",
        ),
    ],
)
def test_what_does_not_hold_says_why(system, monkeypatch, change, key, words):
    """One condition alone, with its reading and when it ends."""
    monkeypatch.setattr(module.time, "process_time", lambda: 0.0)
    change(system)
    failing = reasons(system)
    assert list(failing) == [key]
    assert failing[key].startswith(words)


def test_the_load_is_that_of_others_since_the_last_look(system, monkeypatch):
    """What this process computes itself is no reason to stop."""
    monkeypatch.setattr(module.os, "sysconf", lambda _name: 100)
    monkeypatch.setattr(module.time, "process_time", lambda: 7.0)
    system.processors(busy=1000, idle=1000)
    ticks = CheckCounters()
    ticks.load(system.root)
    system.processors(busy=1900, idle=1100)
    assert ticks.load(system.root) == pytest.approx(0.9)
    ticks.last = (1000, 2000, 0)
    assert ticks.load(system.root) == pytest.approx(0.2)
    assert ticks.load(system.root) is None  # no time has passed


@pytest.mark.parametrize(
    ("clock", "until"),
    [
        ("21:59", ""),
        ("22:00", "06:30"),
        ("00:00", "06:30"),
        ("03:00", "06:30"),
        ("06:30", ""),
        ("13:59", "14:00"),
    ],
)
def test_quiet_hours(system, monkeypatch, clock, until):
    """Over midnight or not; the last minute is not one of them."""
    monkeypatch.setattr(module.time, "strftime", lambda _form: clock)
    failing = reasons(system, quiet_hours=("22:00-06:30", "13:00-14:00"))
    assert [reason.split("; ")[1] for reason in failing.values()] == (
        [f"it continues at {until}, local time"] if until else []
    )


def test_the_clock_may_jump(system, monkeypatch):
    """A board without a battery for its clock starts anywhere, and is right once it has the
    time.
    """
    clock = ["03:00"]
    monkeypatch.setattr(module.time, "strftime", lambda _form: clock[0])
    rules = {
        "quiet_hours": ("22:00-06:30", "13:00-14:00"),
        "settle_seconds": 30,
        "root": system.root,
    }
    watch = ConditionWatch(ConditionsConfig.model_validate(rules))
    assert "22:00-06:30" in watch.check(0.0)
    clock[0] = "13:30"
    assert "13:00-14:00" in watch.check(10.0)
    clock[0] = "12:00"  # back
    assert watch.check(20.0) != ""
    assert watch.check(40.0) == ""


def test_a_system_that_tells_nothing_holds(tmp_path):
    """A condition that cannot be read must not stop a board for ever; `doctor` warns of it."""
    readings = seen(FakeSystem(tmp_path))
    assert [key for key, reading in readings.items() if reading.text] == ["new_data", "quiet_hours"]
    assert not any(reading.reason for key, reading in readings.items() if key != "quiet_hours")


def test_the_battery_of_a_mouse_does_not_count(system):
    """It says that it is a device's."""
    system.battery("Discharging", 5)
    system.write("sys/class/power_supply/BAT0/scope", "Device")
    sysfs = system.root / "sys" / "class"
    assert (on_battery(sysfs), charge(sysfs)) == (None, None)


def test_a_board_without_a_thermal_zone(system):
    """The hottest of its other sensors counts; where there is a zone, a hot disk does not."""
    sysfs = system.root / "sys" / "class"
    for number, value in (("1", 95000), ("2", 40000)):
        system.write(f"sys/class/hwmon/hwmon0/temp{number}_input", value)
    assert temperature(sysfs) == 50
    (sysfs / "thermal/thermal_zone0/temp").unlink()
    assert temperature(sysfs) == 95


def test_an_interface_of_either_family_counts(system):
    """IPv6 has its own routes; of each family the nearest default counts."""
    default = "0" * 32 + " 00 " + "0" * 32 + " 00 " + "0" * 32
    ipv6_route = "fe80" + "0" * 28 + " 40 " + "0" * 32 + " 00 " + "0" * 32
    rows = [
        (default, "00000400", "wwan0"),
        (default, "0000000a", "eth0"),
        (ipv6_route, "00000001", "wwan0"),
        (default, "ffffffff", "lo"),
    ]

    def routes(rows):
        system.write(
            "proc/net/ipv6_route",
            "\n".join(f"{to} {metric} 1 0 3     {name}" for to, metric, name in rows),
        )

    routes(rows)
    assert reasons(system, metered=("wwan*",)) == {}
    routes([row for row in rows if row[2] != "eth0"])
    assert "it is on the metered network wwan0" in reasons(system, metered=("wwan*",))["metered"]
    routes([])
    system.route()
    assert seen(system, metered=("wwan*",))["metered"].text == "no default route"


def test_two_limits_and_a_time(system):
    """Above 80 it pauses; it goes on at 70, and only after that has held for a while."""
    watch = ConditionWatch(
        ConditionsConfig(celsius=(80, 70), settle_seconds=30, look_seconds=10, root=system.root)
    )

    def look(celsius, now):
        system.celsius(celsius)
        return watch.check(now)

    assert look(80, 0.0) == ""
    assert look(81, 10.0) == "paused: the temperature rose above 80 °C; it continues at 70 °C"
    assert watch.check_at == 20.0
    assert look(75, 20.0) == look(71, 20.0) != ""  # not every degree is told
    assert look(70, 30.0) != ""
    assert look(75, 40.0) != ""
    assert look(69, 69.0) != ""
    assert look(69, 70.0) == ""
    assert look(75, 80.0) == ""


def test_pressure_has_two_limits(system):
    """As temperature has; a kernel that does not account for it lets the board train."""
    watch = ConditionWatch(
        ConditionsConfig(memory_pressure=(0.2, 0.1), settle_seconds=0, root=system.root)
    )
    held = []
    for share in (15.0, 21.0, 15.0, 10.0, 15.0):
        system.pressure("memory", share)
        held.append(bool(watch.check(0.0)))
    assert held == [False, True, True, False, False]
    (system.root / "proc/pressure/memory").unlink()
    assert (watch.check(0.0), watch.readings["memory_pressure"].text) == ("", "")


def test_new_samples_are_waited_for(system):
    """Up to the number, which is enough; who does not count them lets the board train."""
    watch = ConditionWatch(ConditionsConfig(new_data=100, settle_seconds=0, root=system.root))
    for fresh, reason in (
        (None, ""),
        (99, "paused: it waits for 100 new samples"),
        (100, ""),
        (-5, "paused: it w"),
    ):
        watch.ticks.fresh = fresh
        assert watch.check(0.0)[: len(reason) or None] == reason, fresh


def test_no_conditions_no_looks(tmp_path):
    """A board whose operator asks for nothing reads nothing."""
    watch = ConditionWatch(ConditionsConfig(root=tmp_path))
    assert (watch.check_at, watch.check(0.0), watch.readings) == (float("inf"), "", {})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("celcius = [80, 70]", "did you mean 'celsius'?"),
        ("celsius = [70, 80]", "continues at the second, which must be smaller"),
        ("battery = [0.5, 0.3]", "continues at the second, which must be larger"),
        ("celsius = [80000, 70000]", "conditions.celsius.0.* less than or equal to 150"),
        ("cpu_pressure = [0.1, 0.2]", "continues at the second, which must be smaller"),
        ("new_data = 0", "conditions.new_data.* greater than or equal to 1"),
        ("celsius = 80", r"conditions.celsius: Input should be a list, in \[ \] .got 80."),
        ("load = [50, 30]", "conditions.load.0.* less than or equal to 1"),
        ('quiet_hours = ["22-6"]', "conditions.quiet_hours.0.*two different times"),
        ('quiet_hours = ["22:00-22:00"]', "two different times of 24 hours"),
        ('quiet_hours = ["22:00-24:00"]', "two different times of 24 hours"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, line, words):
    """With the key, and the nearest known one."""
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        load_device_config(written(tmp_path, line))


@pytest.fixture
def scene(tmp_path, system):
    """A device with conditions, its server, and a set to train."""
    x, y = samples(50)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    tiny = write_tiny_set(tmp_path / "blobs")
    with (
        any_broker(tmp_path) as broker,
        scripted_server(broker.url, BlobStore(tmp_path / "blobs")) as server,
    ):
        data = {"kind": "npz", "path": str(tmp_path / "data.npz")}
        device = DeviceProcess(tmp_path / "device", broker.url, data)
        rules = (
            f"celsius = [80, 70]\nlook_seconds = 0.1\nsettle_seconds = 0.2\nroot = "
            f'"{system.root}"\n'
        )
        device.config.write_text(f"{device.config.read_text()}[conditions]\n{rules}")
        try:
            yield server, device, tiny.choice(initial_weights())
        finally:
            device.kill()


def wait_profile(server, unable):
    """A profile that says that the board pauses, or that it does not."""
    start = len(server.profiles)

    def said():
        return any(
            bool(profile.unable) is unable for profile in server.profiles[max(0, start - 1) :]
        )

    server.wait(said, what=f"a profile with unable={unable}")
    return server.profiles[-1]


@pytest.mark.slow
def test_a_board_pauses_gives_its_task_back_and_goes_on(scene, system):
    """In a real process: told in the profile, refused with the reason, and taken up again when it
    is cool.
    """
    server, device, choice = scene
    system.celsius(85)
    device.start()
    assert wait_profile(server, unable=True).unable.startswith(
        "paused: the temperature rose above 80 °C"
    )
    server.offer(device.id, choice)
    refused = server.wait_message(Refuse, "t1")
    assert (refused.reason, refused.detail[:23]) == (RefusalReason.BUSY, "paused: the temperature")

    system.celsius(60)
    assert wait_profile(server, unable=False).temperature_celsius == 60
    server.offer(device.id, choice, task="t2", train={"epochs": 10**6})
    server.wait_message(Progress, "t2")
    system.celsius(90)
    assert server.wait_message(Refuse, "t2").detail.startswith("paused: the temperature")
    assert wait_profile(server, unable=True).temperature_celsius == 90
    states = device.states()
    assert states[-3:] == ["training", "refusing", "idle"]

    system.celsius(60)
    wait_profile(server, unable=False)
    server.offer(device.id, choice, task="t3")
    server.wait_update("t3")


@pytest.mark.slow
def test_a_board_trains_when_it_has_new_samples(scene, system, tmp_path):
    """Those of the file as it is then; over a restart, too, and with a file that is half written in
    between.
    """
    server, device, choice = scene
    text = device.config.read_text()
    device.config.write_text(text.replace("celsius = [80, 70]", "new_data = 40"))
    device.start()
    server.wait_state("idle")
    server.offer(device.id, choice)
    server.wait_update("t1")
    assert wait_profile(server, unable=True).unable == "paused: it waits for 40 new samples"

    def write(count):
        x, y = samples(count)
        np.savez(tmp_path / "fresh.npz", x=x, y=y)
        (tmp_path / "fresh.npz").replace(tmp_path / "data.npz")

    write(89)
    device.terminate()
    device.start()
    server.wait(lambda: server.profiles[-1].examples > 50)  # all but those that are held out
    assert server.profiles[-1].unable == "paused: it waits for 40 new samples"
    (tmp_path / "data.npz").write_bytes(b"PK")
    device.wait_log("still using the samples read before")
    write(90)
    server.wait(lambda: not server.profiles[-1].unable)
    assert server.profiles[-1].examples == 81
    server.offer(device.id, choice, task="t2")
    server.wait_update("t2")
    assert server.wait_message(Done, "t2").metrics.examples == 81
    server.wait(lambda: bool(server.profiles[-1].unable))


def test_doctor_shows_each_condition_with_its_reading(tmp_path, system, monkeypatch):
    """Ok, a warning where it would pause now, and one where the board does not tell."""
    monkeypatch.setattr(doctor, "_CONFIGURED", ())  # the checks before, which take seconds
    rules = f'mains = true\ncelsius = [80, 70]\nunthrottled = true\nroot = "{system.root}"'
    config = written(tmp_path, rules)
    system.celsius(81)
    for path in (
        "devices/platform/soc/soc:firmware/get_throttled",
        "class/thermal/cooling_device0/type",
    ):
        (system.root / "sys" / path).unlink()
    findings = takewhile(lambda finding: finding.check != "network", doctor.examine(config))
    shown = {
        shown_finding.check: (shown_finding.level, shown_finding.detail)
        for shown_finding in findings
        if shown_finding.check.startswith("condition")
    }
    assert shown == {
        "condition mains": ("ok", "no battery discharges"),
        "condition celsius": (
            "warning",
            (
                "the temperature: 81 °C; the board would pause now: the temperature rose above 80 °C; it "
                "continues at 70 °C"
            ),
        ),
        "condition unthrottled": (
            "warning",
            "this board does not report it, so the condition always holds; remove it from [conditions]",
        ),
    }
