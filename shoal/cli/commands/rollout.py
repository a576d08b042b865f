"""Send a new runtime or new artifact sets to boards over the air, to a few of them first.

A board returns to its previous release if the new one fails.

Example: shoal rollout start flash.toml --canary 5
"""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fleet_protocol.errors import ConfigError
from shoal.cli.common import (
    HERE,
    AsJson,
    FleetFolder,
    PageUrl,
    StoreFolder,
    Watch,
)
from shoal.cli.console import say
from shoal.extras import needs

if TYPE_CHECKING:
    from broker_server.rounds.artifacts import Artifacts

_VALID_DAYS = 90
"""How long the signature of a release is valid."""

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


def _percent(text: str) -> float:
    if not 0 < (share := float(text.removesuffix("%"))) <= 100:
        raise ValueError(f"{text} is not more than 0 and at most 100 percent")
    return share


@app.command("start")
def _start(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(help="Descriptions of the boards, flash.toml; one for each kind."),
    ] = None,
    artifacts: Annotated[
        Path | None,
        typer.Option(help="Instead: exported sets for the run in progress, of the same model."),
    ] = None,
    stages: Annotated[
        list[float] | None,
        typer.Option("--stage", parser=_percent, help="Percent; by default 5, 25, then 100."),
    ] = None,
    canary: Annotated[
        float | None,
        typer.Option(parser=_percent, help="Percent of the boards first, then all: two stages."),
    ] = None,
    failed: Annotated[
        float, typer.Option(min=0, max=100, help="Percent of them that may fail.")
    ] = 0.0,
    gate: Annotated[
        int,
        typer.Option(min=0, help="Training tasks that each must first finish with it."),
    ] = 0,
    within: Annotated[
        float,
        typer.Option(min=1, help="Minutes in which a board must be back with it."),
    ] = 60.0,
    folder: FleetFolder = HERE,
    *,
    store: StoreFolder,
) -> None:
    """Sign this version of Shoal, or artifact sets, which a running server sends to boards.

    The signature is valid for 90 days. A board must finish a training task with a new set before
    the next stage, or --gate tasks.

    Example: shoal rollout start --artifacts artifacts --canary 5
    """
    with needs("server"):
        from broker_server.service.rollout import start_rollout
    from fleet_protocol.identity.release import board_kind
    from shoal.flash.bundle import release_files
    from shoal.flash.settings import load_flash_config

    if canary is not None and stages:
        raise ConfigError("--canary says the stages, and so does --stage; name one of them")
    if bool(configs) == (artifacts is not None):
        raise ConfigError(
            "name a flash.toml for a runtime, or --artifacts for the sets of the run in progress"
        )
    sets = None
    if artifacts is not None:
        sets = _other_sets(folder, store, artifacts)
        gate = max(gate, 1)
    builds = {}
    for path in configs or ():
        board = load_flash_config(path)
        builds[board_kind(board.target.machine, board.target.python)] = release_files(board)
    percents = [5.0, 25.0, 100.0]
    if stages:
        percents = stages
    elif canary is not None:
        percents = [canary, 100.0]
    limits = {
        "stages": [percent / 100 for percent in percents],
        "most_failed": failed / 100,
        "within_seconds": within * 60,
        "gate": gate,
    }
    release = start_rollout(folder, builds, _VALID_DAYS, sets, **limits).release
    kinds = ", ".join(builds or release.sets)
    say(f"release {release.number} for {kinds}; see how it goes with `shoal rollout show`")


def _other_sets(folder: Path, store: Path, artifacts: Path) -> "Artifacts":
    """Return the exported sets of a folder that fit the run in progress.

    Raises:
        ConfigError: no run is in progress, its server has not resumed it, or the sets are of
            another model.
    """
    with needs("server"):
        from broker_server.rounds.other_sets import load_other_sets
        from broker_server.service.certificates import Authority
        from broker_server.store import Store
        from broker_server.store.configurations import saved_config

    with closing(Store(store)) as opened:
        run = opened.unfinished(Authority.read(folder).fleet)
    if run is None:
        raise ConfigError(
            f"no run is in progress in {store}; a run that begins takes the sets of its [model]"
        )
    config = saved_config(store, run.id)
    if config is None:
        raise ConfigError(
            f"the server of {store} has not resumed run {run.id} yet: start the server, and repeat "
            "this command"
        )
    return load_other_sets(config, artifacts.resolve())


def _steer(verb: Literal["pause", "resume", "stop"], about: str, then: str) -> None:
    @app.command(verb, help=f"{about}\n\nExample: shoal rollout {verb}")
    def _command(folder: FleetFolder = HERE, url: PageUrl = "") -> None:
        with needs("server"):
            from broker_server.service.rollout import steer_rollout
            from shoal.sources import connect

        if url:
            number = connect(url).act_on_rollout(verb)
        else:
            number = steer_rollout(folder, verb).release.number
        say(f"release {number} {then}")


_steer(
    "pause",
    "Pause the rollout: the server asks no more boards; those that it asked continue.",
    "goes to no more boards for now",
)
_steer("resume", "Resume a rollout that is paused.", "goes on")
_steer(
    "stop",
    "Stop the rollout for good; boards that run the release keep it.",
    "goes to no more boards",
)


@app.command("show")
def _show(
    folder: FleetFolder = HERE,
    *,
    store: StoreFolder,
    url: PageUrl = "",
    as_json: AsJson = False,
    watch: Watch = False,
) -> None:
    """Show the progress of the newest rollout, and its outcome on each board.

    Example: shoal rollout show --watch
    """
    with needs("server"):
        from shoal.cli.views.rollout import rollout_view

    rollout_view(folder).show(store, None, as_json=as_json, watch=watch, url=url)
