"""Worked examples of WHALE-FL: traces of two devices, the choice of widths, times of rounds (W1 to
W3).
"""

from types import MappingProxyType
from typing import Any

from device_runtime.training.choosers.adaptive import Progress, choose, normalise, observe, quantise
from fleet_protocol.sizing import SizingConstants
from simulation.clock import Clock, Load
from simulation.clock_settings import ClockConfig, ClockTable, DeviceType
from tests.conformance.entry import Check, Entry

__all__ = ["HANDLERS"]

_MEGABIT = 1_000_000


def w1(entry: Entry, check: Check) -> None:
    """Round after round, what each device computes and chooses."""
    given = entry.inputs
    settings = SizingConstants(
        alpha=given["alpha"],
        target_loss=given["target_loss"],
        stall=given["delta_th"],
        step=given["beta"],
        gamma=given["gamma"],
        theta=given["theta"],
        efficiency=given["SE"],
    )
    for name, device in given["devices"].items():
        state = Progress(training_efficiency=given["TE0"])
        rows: list[dict[str, Any]] = []
        for number, (transmit, loss) in enumerate(zip(device["Tcm"], device["loss"], strict=True)):
            choice = choose(
                state,
                settings,
                transmit_seconds=transmit,
                compute_seconds=device["Tcp"],
                maximum=device["smax"],
            )
            rows.append(
                {
                    "r": number,
                    "SE": choice.system_efficiency,
                    "TE": choice.training_efficiency,
                    "U": choice.utility,
                    "Un": choice.normalised,
                    "wanted_rate": choice.wanted,
                    "rate": choice.width,
                }
            )
            # The record lives in a file between rounds.
            state = type(state).model_validate_json(
                observe(state, settings, loss).model_dump_json()
            )
        check.same(name, rows, entry.expected[name])


def w2(entry: Entry, check: Check) -> None:
    """Utilities to widths."""
    shares = [normalise(value, entry.inputs["theta"]) for value in entry.inputs["U"]]
    check.same("Un", shares, entry.expected["Un"])
    check.same("rate", [quantise(share) for share in shares], entry.expected["rate"])


def w3(entry: Entry, check: Check) -> None:
    """Times of devices and of rounds, by the clock of simulations."""
    given = entry.inputs
    types = {
        name: DeviceType(seconds_per_sample=times) for name, times in given["step_time"].items()
    }
    clock = Clock(ClockTable(types=types), ClockConfig(full_bits=_MEGABIT))

    def seconds(device: str, width: float) -> float:
        # A link on which one megabit, all that the model has here, takes the time that is given.
        on_link = clock.device(device, 1 / given["full_comm_time"][device])
        return clock.device_seconds(on_link, Load(float(width), given["batch"], given["K"]))

    full = {device: seconds(device, 1.0) for device in given["step_time"]}
    assigned = {device: seconds(device, width) for device, width in given["assignment"].items()}
    check.same("all_full", full, entry.expected["all_full"])
    check.same("round_all_full", max(full.values()), entry.expected["round_all_full"])
    check.same("assigned", assigned, entry.expected["assigned"])
    check.same("round_assigned", max(assigned.values()), entry.expected["round_assigned"])


HANDLERS = MappingProxyType({"W1": w1, "W2": w2, "W3": w3})
"""What computes an entry, by the prefix of its id."""
