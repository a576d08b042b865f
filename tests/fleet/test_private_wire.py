"""What a listener at the broker hears of the private parts of boards: nothing, in any encoding."""

import numpy as np
import pytest

from fleet_protocol.encodings import ENCODINGS, encode
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.weights import encode_weights
from tests.fleet.overhearing import occurrences, overheard, unpacked
from tests.simulation.simulations import as_a_fleet, settings, tensors

ROUNDS = 2
HEAD = {"private": {"parts": ["head"]}}
CONV = {"arch": "conv", "settings": {"channels": (8, 16)}, "widths": (1.0,)}
EXITS = {
    "arch": "exit_resnet",
    "settings": {"channels": (8, 12), "blocks": (1, 1), "norm": "instance"},
    "widths": (1.0,),
    "depths": (1, 2),
    "recipe": {"loss": "all-exits-teach"},
}
WINDOW = {
    "arch": "mlp",
    "settings": {"hidden": (16, 12)},
    "widths": (1.0,),
    "trained": (1.0, 0.5),
    "windows": True,
}

CASES = {
    **{encoding: {**HEAD, "upload": {"encoding": encoding}} for encoding in ENCODINGS},
    "fedrep": {"private": {"parts": ["head"], "private_epochs": 1}},
    "fedbn": {"private": {"parts": ["*norm*"]}},
    "ditto": {
        "model": {**CONV, "recipe": {"proximal": True}},
        "private": {"copy_model": True, "mu": 0.1},
    },
    "compared": {"private": {"parts": ["head"], "compare": True, "adapt_epochs": 1}},
    "exits": {
        "model": EXITS,
        "private": {"parts": ["exits"]},
        "strategy": {"name": "depthfl", "depthfl": {"ramp_rounds": 2}},
        "devices": {"count": 2, "types": [{"max_depth": 1}, {"max_depth": 2}]},
    },
    "window": {
        **HEAD,
        "model": WINDOW,
        "strategy": {"name": "heterofl", "window": "rolling"},
        "tiers": {"assign": "capacity", "levels": None, "allowed": ("w1.00-d1-t0.50",)},
    },
}


def kept_by_boards(folder):
    """The private values of each board and round: what they are, and what the board began with."""
    for path in sorted(folder.glob("devices/*/private-*.safetensors")):
        number = int(path.stem.rpartition("-")[2])
        for name, value in tensors_in(path.read_bytes()).items():
            yield number, name.partition("/")[2], value


def searched(folder, versions):
    """Private values, and their changes since the fleet's version, by a name for each."""
    found = {}
    for place, (number, name, value) in enumerate(kept_by_boards(folder)):
        # The version before, also where the server refused every update; cut like the sub-model.
        version = versions[min(number, len(versions)) - 1]
        sent = version[name][tuple(slice(size) for size in value.shape)]
        # A value that training did not move is the one that the server sent.
        if not np.array_equal(value, sent):
            found[f"{name}, {place}"] = value
            found[f"change of {name}, {place}"] = value - sent
    return found


@pytest.mark.parametrize("encoding", ENCODINGS[1:])
def test_the_search_finds_a_tensor_in_every_encoding(encoding):
    """Among others, wherever it begins."""
    draw = np.random.default_rng(0)
    sizes = {"a": (5,), "b": (10, 16), "c": (301,)}
    update = {name: draw.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    parts = encode(update, encoding)
    haystacks = [encode_weights(parts), *unpacked(parts)]
    count, found = occurrences(haystacks, {"b": update["b"]})
    assert found
    other = draw.normal(size=sizes["b"]).astype(np.float32)
    assert occurrences(haystacks, {"b": other}) == (count, [])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_private_value_passes_the_broker(tmp_path, name):
    """A subscriber to all topics finds no row of them, rounded or whole, and no name in an
    update.
    """
    tables = {
        "model": CONV,
        "devices": {"count": 2},
        "round": {"rounds": ROUNDS, "fraction": 1.0},
        "tiers": {"assign": "capacity", "levels": None},
        **CASES[name],
    }
    config = settings(tmp_path / "simulation", tmp_path / "cache", **tables)
    with overheard(tmp_path) as (broker, listener):
        finished = as_a_fleet(config, tmp_path, holdout=0.2, broker_url=broker.url)
    versions = tensors(tmp_path / "fleet", finished.run)
    haystacks = listener.haystacks
    # The search can find: it finds what the server sent.
    _, passed = occurrences(haystacks, versions[0])
    assert passed
    private = searched(tmp_path, versions)
    count, leaked = occurrences(haystacks, private)
    assert count > 4 * len(private) > 0
    assert not leaked
    assert finished.status == "finished", finished.error
    assert len(listener.updates) >= 2 * ROUNDS
    if "copy_model" in tables["private"]:
        return
    for own in {name for _, name, _ in kept_by_boards(tmp_path)}:
        assert not [said for said in listener.said_by_boards if own.encode() in said]
