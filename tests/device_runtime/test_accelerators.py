"""Execution providers beside the CPU: tried before they train, left where they are wrong, broken or
slow.

The providers of these tests are the CPU behind another memory, as an accelerator has one: what they
read is what was there when it was bound, so a step that trusts its buffers is wrong on them.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from device_runtime import processor_share
from device_runtime.self_test import provider_test
from device_runtime.settings import RuntimeConfig
from device_runtime.training import accelerators
from device_runtime.training.accelerators import Accelerators, Trial
from device_runtime.training.backends import Sessions, runtime
from device_runtime.training.backends.runtime import offered
from device_runtime.training.compute import compute
from device_runtime.training.hooks import ChosenProvider, EpochReport, Hooks, TaskStopped
from device_runtime.training.task import DeviceSetup, Task
from fleet_protocol.data import make_dataset
from fleet_protocol.errors import RefusedError
from fleet_protocol.messages import Instructions, TrainSettings
from tests.brokers import any_broker
from tests.device_runtime.device_process import REPOSITORY, DeviceProcess
from tests.device_runtime.scripted_server import RUN, scripted_server
from tests.device_runtime.tiny_set import (
    ADAPTIVE,
    initial_weights,
    overflowing_weights,
    samples,
    write_tiny_set,
)

REAL = runtime.make_session
TRIAL_STEPS = 5
GRAPH = "b3-abc onnxruntime 1.0"


class Session:
    """A session of the CPU, whose inputs may be in another memory; `step` runs it and may do so
    badly.
    """

    def __init__(self, session, step, binding):
        self._session = session
        self._step = step
        self._binding = binding
        self.count = 0

    def __getattr__(self, name):
        return getattr(self._session, name)

    def io_binding(self):
        return self._binding(self._session.io_binding())

    def run_with_iobinding(self, binding):
        self.count += 1
        self._step(self, binding)

    def run_once(self, binding):
        self._session.run_with_iobinding(binding.real)


class Binding:
    """That of the CPU."""

    def __init__(self, real):
        self.real = real
        self._kept = {}

    def __getattr__(self, name):
        return getattr(self.real, name)


class Elsewhere(Binding):
    """Copies what is bound as an input."""

    def bind_ortvalue_input(self, name, value):
        self.bind_cpu_input(name, value.numpy())

    def bind_cpu_input(self, name, value):
        self._kept[name] = value.copy()  # the runtime reads it where it is
        self.real.bind_cpu_input(name, self._kept[name])


def right(session, binding):
    session.run_once(binding)


def slow(session, binding):
    for _ in range(30):
        session.run_once(binding)


def wrong(session, binding):
    """The learning rate is another from the second step on."""
    if session.count > 1:
        binding.bind_cpu_input("lr", np.array(0.02, np.float32))
    session.run_once(binding)


def silent(session, binding):
    """Nothing is computed."""


def dead(session, binding):
    raise RuntimeError("CUDA failure 719: unspecified launch failure")


@pytest.fixture
def provide(monkeypatch):
    """Providers by name, each with what its sessions do; the CPU is slow unless it is said
    otherwise.
    """
    opened = []

    def arrange(cpu=slow, **steps):
        def make(graph, options, provider):
            opened.append(provider)
            step = cpu if provider == "CPU" else steps[provider]
            if step is None:
                raise RuntimeError(
                    "cudaGetDeviceCount() failed: no CUDA-capable device is detected"
                )
            return Session(
                REAL(graph, options, "CPU"), step, Binding if provider == "CPU" else Elsewhere
            )

        monkeypatch.setattr(runtime, "make_session", make)
        monkeypatch.setattr(accelerators, "offered", lambda: (*steps, "CPU"))
        return opened

    return arrange


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_set(tmp_path_factory.mktemp("tiny"), states=ADAPTIVE)


@pytest.fixture
def settled(tiny, tmp_path):
    """Which provider some are settled to, with the trials in a file."""

    def settle(*names, graph=GRAPH, hooks=None, **options):
        def opened(provider):
            return Sessions(1, provider).train(tiny.manifest, tiny.graph("onnx/train"), {})

        wanted = Accelerators(tmp_path / "providers.json", names, **options)
        return wanted.settle(graph, tiny.manifest, 8, opened, hooks or Hooks())

    return settle


def test_a_provider_that_is_right_and_faster_is_used(provide, settled):
    provide(GPU=right)
    choice = settled("GPU")
    assert choice.provider == "GPU", choice
    assert "steps in the time of one CPU step" in choice.why


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (None, "GPU failed in a trial: RuntimeError: cudaGetDeviceCount"),
        (dead, "GPU failed in a trial: RuntimeError: CUDA failure 719"),
        (wrong, "GPU computes wrong loss: the deviation is 1.2e-02"),
        (silent, "GPU computes wrong loss: the deviation is 1.0e+00"),
    ],
    ids=["does not open", "dies", "is wrong", "does nothing"],
)
def test_what_is_broken_leaves_the_cpu(provide, settled, step, words):
    """Also where the operator insists; the next in the list has its turn."""
    provide(GPU=step, NPU=right)
    choice = settled("GPU", insist=True)
    assert choice.provider == "CPU"
    assert choice.why.startswith(words)
    assert settled("GPU", "NPU").provider == "NPU"


def test_a_slower_one_is_used_where_the_operator_insists(provide, settled):
    opened = provide(cpu=right, GPU=slow)
    choice = settled("GPU")
    assert (choice.provider, "steps in the time of one" in choice.why) == ("CPU", True)
    del opened[:]
    assert settled("GPU", insist=True).provider == "GPU"
    assert opened == []  # the trial need not be made again for that


def test_a_trial_is_made_once_for_graph_runtime_and_provider(provide, settled):
    opened = provide(GPU=right, NPU=dead)
    settled("NPU", "GPU")
    assert opened == ["CPU", "NPU", "GPU"]  # the CPU's steps serve both
    settled("NPU", "GPU")
    assert len(opened) == 3
    settled("NPU", "GPU", graph="b3-abc onnxruntime 1.1")
    assert len(opened) == 6


def test_a_damaged_file_costs_a_trial(provide, settled, tmp_path):
    opened = provide(GPU=right)
    settled("GPU")
    (tmp_path / "providers.json").write_text("{")
    assert settled("GPU").provider == "GPU"
    assert len(opened) == 4


def test_a_trial_that_nobody_wants_any_more_says_nothing_of_the_provider(
    provide, settled, tmp_path
):
    provide(GPU=right)
    asked = iter([False] * TRIAL_STEPS + [True])
    with pytest.raises(TaskStopped):
        settled("GPU", hooks=Hooks(stopped=lambda: next(asked)))
    assert json.loads((tmp_path / "providers.json").read_text()) == {}


KILLED = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from device_runtime.training import accelerators
from device_runtime.training.backends import Sessions, runtime
from device_runtime.training.hooks import Hooks
from fleet_protocol.manifest import Manifest
real, folder = runtime.make_session, Path(sys.argv[1])
accelerators.offered = lambda: ("GPU", "CPU")
runtime.make_session = lambda graph, options, name: real(graph, options, name) if name == "CPU" else os._exit(9)
manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
opened = lambda name: Sessions(1, name).train(manifest, folder / "train.onnx", {})
accelerators.Accelerators(Path(sys.argv[2]), ("GPU",)).settle(sys.argv[3], manifest, 8, opened, Hooks())
"""


def test_a_trial_that_takes_the_agent_down_is_not_repeated(provide, settled, tmp_path):
    set_folder = REPOSITORY / "device_runtime" / "self_test_set"
    arguments = [
        sys.executable,
        "-c",
        KILLED,
        str(set_folder),
        str(tmp_path / "providers.json"),
        GRAPH,
    ]
    assert subprocess.run(arguments, cwd=REPOSITORY, timeout=120, check=False).returncode == 9
    opened = provide(GPU=right)
    choice = settled("GPU")
    assert (choice.provider, "GPU crashed the agent in a trial" in choice.why, opened) == (
        "CPU",
        True,
        [],
    )


def test_what_the_runtime_does_not_have(settled):
    choice = settled("Nowhere")
    assert choice == ChosenProvider(
        "CPU", f"Nowhere is not a provider of this onnxruntime (it has {', '.join(offered())})"
    )


def test_a_provider_that_the_runtime_has(tiny, settled):
    """The installed one lists some that compute nothing themselves: the CPU's bits, at the CPU's
    speed.
    """
    if offered() == ("CPU",):
        pytest.skip("this onnxruntime has the CPU alone")
    name = next(offer for offer in offered() if offer != "CPU")
    assert settled(name, insist=True).provider == name
    assert provider_test(name) == ""


@pytest.mark.parametrize(
    ("alone", "two", "chosen"),
    [(slow, right, "CPU:2"), (right, slow, "CPU")],
    ids=["they pay", "they do not"],
)
def test_more_threads_of_the_cpu_are_taken_where_they_pay(settled, monkeypatch, alone, two, chosen):
    """They are tried as another provider is: the numbers are those of one thread, but for
    rounding.
    """
    opened = []

    def make(graph, options, provider):
        opened.append((provider, options.intra_op_num_threads))
        return Session(REAL(graph, options, provider), alone if len(opened) == 1 else two, Binding)

    monkeypatch.setattr(runtime, "make_session", make)
    assert settled("CPU:2").provider == chosen
    assert opened == [("CPU", 1), ("CPU", 2)]


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        ({1: slow, 2: right, 3: slow}, "CPU:2"),
        ({1: slow, 2: slow, 3: right}, "CPU:3"),
        ({1: right, 2: slow, 3: slow}, "CPU"),
        ({1: slow, 2: dead, 3: right}, "CPU:3"),
    ],
)
def test_a_task_takes_as_many_threads_as_are_fastest(settled, monkeypatch, steps, chosen):
    """And says whether its bits are those of one; a trial that fails leaves the others."""
    opened = []

    def make(graph, options, provider):
        opened.append(options.intra_op_num_threads)
        return Session(REAL(graph, options, provider), steps[opened[-1]], Binding)

    monkeypatch.setattr(runtime, "make_session", make)
    choice = settled(threads=(2, 3))
    assert choice.provider == chosen
    assert ("with the same bits" in choice.why) == (chosen != "CPU")
    assert "CPU:2" in choice.why or chosen != "CPU"
    assert sorted(opened) == [1, 2, 3]
    assert settled(threads=(2, 3)) == choice
    assert len(opened) == 3


@pytest.mark.parametrize(
    ("files", "counts"),
    [
        ({}, (2, 4)),
        ({"proc/self/cgroup": "0::/shoal\n", "sys/fs/cgroup/shoal/cpu.max": "max 100000"}, (2, 4)),
        (
            {"proc/self/cgroup": "0::/shoal\n", "sys/fs/cgroup/shoal/cpu.max": "250000 100000"},
            (2, 3),
        ),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, ()),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/shoal\n",
                "sys/fs/cgroup/cpu/shoal/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/shoal/cpu.cfs_period_us": "100000\n",
            },
            (2,),
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/shoal\n",
                "sys/fs/cgroup/cpu/shoal/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/shoal/cpu.cfs_period_us": "100000\n",
            },
            (2, 4),
        ),
    ],
)
def test_no_more_threads_are_tried_than_the_unit_may_use(tmp_path, monkeypatch, files, counts):
    """A quota of its control group, or of one around it, is rounded up to whole processors."""
    monkeypatch.setattr(processor_share, "available_cores", lambda: 4)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert processor_share.thread_counts(tmp_path) == counts


def test_a_provider_is_named_with_its_threads():
    """As onnxruntime names it, or short."""
    assert RuntimeConfig(providers=("CPUExecutionProvider:4", "CUDA")).providers == (
        "CPU:4",
        "CUDA",
    )
    for wrong_name in ("CPU:x", "CPU:", "CPU 4"):
        with pytest.raises(ValueError, match="providers"):
            RuntimeConfig(providers=(wrong_name,))


# In a task.


@pytest.fixture
def device_setup(tiny, tmp_path):
    data = make_dataset("tiny.npz", *samples(50))
    return DeviceSetup(data, tiny.blobs, "onnx", threads=1, holdout=0.0, folder=tmp_path)


def task(tiny, weights):
    instructions = Instructions(
        train=TrainSettings(learning_rate=0.1, epochs=3, batch_size=8, seed=1)
    )
    return Task(
        RUN, 1, "t1", 0, "w1.00-d1", instructions, tiny.manifest, tiny.choice(weights).weights
    )


def failing_after(steps, how):
    """Right for a trial and so many steps of a task."""

    def step(session, binding):
        (how if session.count > steps else right)(session, binding)

    return step


def poisoned(session, binding):
    binding.bind_cpu_input("lr", np.array(np.nan, np.float32))
    session.run_once(binding)


@pytest.mark.parametrize("how", [dead, poisoned])
def test_a_task_in_which_a_provider_fails_is_done_again_on_the_cpu(
    provide, tiny, device_setup, tmp_path, how
):
    """To the bits of a board without one; the next task does not ask the provider again."""
    plain = compute(task(tiny, initial_weights()), device_setup, Hooks())
    opened = provide(GPU=failing_after(TRIAL_STEPS + 4, how))
    device_setup = replace(
        device_setup, accelerators=Accelerators(tmp_path / "providers.json", ("GPU",))
    )
    reports: list[object] = []
    done = compute(task(tiny, initial_weights()), device_setup, Hooks(reports.append))
    assert done.update == plain.update
    assert [report.provider for report in reports if isinstance(report, ChosenProvider)] == [
        "GPU",
        "CPU",
    ]
    assert (
        "GPU failed in a task: "
        in [report for report in reports if isinstance(report, ChosenProvider)][1].why
    )
    assert [report.epoch for report in reports if isinstance(report, EpochReport)] == [1, 1, 2, 3]
    assert opened == ["CPU", "GPU", "GPU", "CPU"]
    del reports[:]
    assert (
        compute(task(tiny, initial_weights()), device_setup, Hooks(reports.append)).update
        == plain.update
    )
    assert [report.provider for report in reports if isinstance(report, ChosenProvider)] == ["CPU"]


def test_what_the_cpu_cannot_do_either_is_not_the_providers_fault(
    provide, tiny, device_setup, tmp_path
):
    provide(GPU=right)
    wanted = Accelerators(tmp_path / "providers.json", ("GPU",))
    with pytest.raises(RefusedError, match="is nan"):
        compute(
            task(tiny, overflowing_weights()), replace(device_setup, accelerators=wanted), Hooks()
        )
    assert [trial.fault for trial in wanted.known().values()] == [""]


def test_a_task_on_a_provider_is_right(provide, tiny, device_setup, tmp_path):
    """Batches of several sizes, the last of an epoch a short one, from a memory that is not
    ours.
    """
    plain = compute(task(tiny, initial_weights()), device_setup, Hooks())
    opened = provide(GPU=right)
    wanted = Accelerators(tmp_path / "providers.json", ("GPU",))
    assert (
        compute(
            task(tiny, initial_weights()), replace(device_setup, accelerators=wanted), Hooks()
        ).update
        == plain.update
    )
    assert opened == ["CPU", "GPU", "GPU"]


def test_a_board_says_what_it_trains_on(tmp_path):
    """In its log and its profile; a task in which the agent died goes on without what may have
    killed it.
    """
    tiny = write_tiny_set(tmp_path / "set")
    x, y = samples(50)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    with any_broker(tmp_path) as broker, scripted_server(broker.url, tiny.blobs) as server:
        device = DeviceProcess(tmp_path, broker.url, {"kind": "npz", "path": "data.npz"})
        with device.config.open("a") as config:
            config.write('[runtime]\nproviders = ["NowhereExecutionProvider"]\n')
        device.start()
        try:
            server.wait_state("idle", device.id)
            assert server.profiles[-1].provider == ""
            server.offer(device.id, tiny.choice(initial_weights()))
            server.wait_update("t1")
            device.wait_log("trains on CPU (Nowhere is not a provider of this onnxruntime")
            server.wait(lambda: server.profiles[-1].provider.startswith("CPU (Nowhere is not a"))
            server.offer(
                device.id, tiny.choice(initial_weights()), task="t2", train={"epochs": 10**6}
            )
            device.wait_log("task=t2 epoch ")
            device.kill()
            device.start()
            device.wait_log("trains on CPU (the agent died during this task)")
        finally:
            device.kill()


def test_only_so_many_trials_are_kept(tmp_path):
    wanted = Accelerators(Path(tmp_path / "providers.json"), ("GPU",))
    for number in range(70):
        wanted.note(f"{number} runtime GPU", Trial(speed=2.0))
    assert [key.split()[0] for key in wanted.known()] == [str(number) for number in range(6, 70)]


def test_a_session_without_its_provider_is_none(monkeypatch):
    """The runtime takes the CPU where a library of a provider is missing, and says so on standard
    error alone.
    """
    asked = {}

    class Without:
        def __init__(self, *_arguments, **options):
            asked.update(options)

        def get_providers(self):
            return ["CPUExecutionProvider"]

    monkeypatch.setattr(runtime, "load_runtime", lambda: SimpleNamespace(InferenceSession=Without))
    assert runtime.make_session(Path("x"), None, "CPU").get_providers() == ["CPUExecutionProvider"]
    with pytest.raises(RuntimeError, match="could not load it"):
        runtime.make_session(Path("x"), None, "CUDA")
    assert (asked["providers"][0], asked["enable_fallback"]) == (
        ("CUDAExecutionProvider", {"use_tf32": "0"}),
        0,
    )
