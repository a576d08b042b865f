"""A new method is one file: put into the folder of the strategies it is found, configured and
built.
"""

import subprocess
import sys
import textwrap

METHOD = '''
"""Half: HeteroFL's merge, of which the server takes a part of the way."""

from dataclasses import replace

from pydantic import Field

from broker_server.strategies import heterofl
from broker_server.strategies.strategy import GlobalModel, Method
from fleet_protocol.frozen import FrozenModel


class HalfSettings(FrozenModel):
    part: float = Field(default=0.5, gt=0, le=1)


def build(basis):
    average = heterofl.build(basis)

    def finish(sums, old):
        new, part = average.merge.finish(sums, old), basis.options.part
        weights = {name: value + part * (new.weights[name] - value) for name, value in old.weights.items()}
        return GlobalModel(weights, new.state)

    return replace(average, name="half", merge=replace(average.merge, finish=finish))


STRATEGIES = {"half": Method(build, HalfSettings)}
'''

USE = """
import broker_server.strategies
broker_server.strategies.__path__.append({folder!r})

from broker_server.settings.fleet import FleetConfig
from fleet_protocol.configuration import parse_config
from fleet_protocol.errors import ConfigError
from broker_server.strategies.registry import build_strategy
from broker_server.strategies.strategy import GlobalModel
from tests.broker_server.artifacts import tiny_layout, tiny_weights

text = "fleet = 'lab'\\n[model]\\narch = 'tiny'\\n[strategy]\\nname = 'half'\\n[strategy.half]\\n"
config = parse_config(text + "part = 0.25", FleetConfig, source="fleet.toml")
layout = tiny_layout()
strategy = build_strategy(config.strategy.settings, layout, (layout.tier(1.0),))
old = GlobalModel(tiny_weights(layout), {{}})
new = strategy.merge.finish(strategy.merge.start(), old)
assert all((new.weights[name] == value).all() for name, value in old.weights.items())
print(strategy.name, config.strategy.settings.options.part)
try:
    parse_config(text + "prat = 0.25", FleetConfig, source="fleet.toml")
except ConfigError as error:
    print(error)
"""


def test_a_strategy_is_found_when_its_file_is_there(tmp_path):
    """Its table is one of fleet.toml's, with the same help against misspelt keys; no list had to
    name it.
    """
    (tmp_path / "half.py").write_text(METHOD)
    script = textwrap.dedent(USE).format(folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    name = done.stdout.splitlines()[:1]
    problem = done.stdout
    assert name == ["half 0.25"]
    assert "did you mean 'part'" in problem
