"""Send a new runtime or new artifact sets to boards over the air, starting with a few boards.

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
from shoal.cli.console import print_text
from shoal.extras import needs

if TYPE_CHECKING:
    from broker_server.rounds.artifacts import Artifacts

_VALID_DAYS = 90
"""How long the signature of a release is valid."""

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


def _percent(text: str) -> float:
    # The percent sign may be omitted.
    if not 0 < (share := float(text.removesuffix("%"))) <= 100:
        raise ValueError(f"{text} is not a percentage above 0 and up to 100")
    return share


@app.command("start")
def _start(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(help="Descriptions of the boards (flash.toml), one for each kind."),
    ] = None,
    artifacts: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a runtime, send the artifact sets in this folder; they must"
            " contain the same model as the run in progress."
        ),
    ] = None,
    stages: Annotated[
        list[float] | None,
        typer.Option(
            "--stage",
            parser=_percent,
            help="Percentage of the boards that have the release after each stage; by default,"
            " 5, 25 and 100.",
        ),
    ] = None,
    canary: Annotated[
        float | None,
        typer.Option(parser=_percent, help="Percentage of the boards in the first of two stages."),
    ] = None,
    failed: Annotated[
        float, typer.Option(min=0, max=100, help="Percentage of a stage's boards that may fail.")
    ] = 0.0,
    gate: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of training tasks that each board must finish before the next stage.",
        ),
    ] = 0,
    within: Annotated[
        float,
        typer.Option(
            min=1, help="Minutes within which a board must reconnect, running the new release."
        ),
    ] = 60.0,
    folder: FleetFolder = HERE,
    *,
    store: StoreFolder,
) -> None:
    """Sign this version of Shoal, or artifact sets, for a running server to send to boards.

    The signature is valid for 90 days. Before the next stage, each board must finish --gate
    training tasks (with new artifact sets, at least one).

    Example: shoal rollout start --artifacts artifacts --canary 5
    """
    with needs("server"):
        from broker_server.service.rollout import start_rollout
    from fleet_protocol.identity.release import board_kind
    from shoal.flash.bundle import release_files
    from shoal.flash.settings import load_flash_config

    if canary is not None and stages:
        raise ConfigError("--canary and --stage both set the stages; give only one of them")
    # Both, or neither.
    if bool(configs) == (artifacts is not None):
        raise ConfigError(
            "give a flash.toml for a runtime, or --artifacts for the sets of the run in progress"
        )
    sets = None
    if artifacts is not None:
        sets = _other_sets(folder, store, artifacts)
        # New graphs prove themselves only by training, so a board must train at least once.
        gate = max(gate, 1)
    builds = {}
    # The release has one build for each kind of board: a machine and a version of Python.
    for path in configs or ():
        board = load_flash_config(path)
        builds[board_kind(board.target.machine, board.target.python)] = release_files(board)
    percents = [5.0, 25.0, 100.0]
    if stages:
        percents = stages
    elif canary is not None:
        # A canary, then everybody: the shortest rollout that can still be stopped.
        percents = [canary, 100.0]
    # The options have percent and minutes, a release shares and seconds.
    limits = {
        "stages": [percent / 100 for percent in percents],
        "most_failed": failed / 100,
        "within_seconds": within * 60,
        "gate": gate,
    }
    release = start_rollout(folder, builds, _VALID_DAYS, sets, **limits).release
    kinds = ", ".join(builds or release.sets)
    print_text(f"release {release.number} for {kinds}; follow it with `shoal rollout show`")


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

    # Closed at once: the server of the store may be running.
    with closing(Store(store)) as opened:
        run = opened.unfinished(Authority.read(folder).fleet)
    if run is None:
        raise ConfigError(
            f"no run is in progress in {store}, so no rollout is needed; a new run uses the"
            " sets of its [model]"
        )
    config = saved_config(store, run.id)
    if config is None:
        raise ConfigError(
            f"the server of {store} has not resumed run {run.id} yet: start the server, and repeat "
            "this command"
        )
    # The server has another working folder, so the path must be absolute.
    return load_other_sets(config, artifacts.resolve())


def _steer(verb: Literal["pause", "resume", "stop"], about: str, then: str) -> None:
    @app.command(verb, help=f"{about}\n\nExample: shoal rollout {verb}")
    def _command(folder: FleetFolder = HERE, url: PageUrl = "") -> None:
        with needs("server"):
            from broker_server.service.rollout import steer_rollout
            from shoal.sources import connect

        if url:
            # Through the page, so that its rules for who may act apply.
            number = connect(url).act_on_rollout(verb)
        else:
            number = steer_rollout(folder, verb).release.number
        print_text(f"release {number} {then}")


_steer(
    "pause",
    "Pause the rollout: boards that were already asked continue, but no further boards are asked.",
    "is paused: the server does not ask any further boards",
)
_steer("resume", "Resume a paused rollout.", "continues")
_steer(
    "stop",
    "Stop the rollout for good; boards that already run the release keep it.",
    "is stopped: the server does not ask any further boards",
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
    """Show the progress of the newest rollout, and the outcome on each board.

    Example: shoal rollout show --watch
    """
    with needs("server"):
        from shoal.cli.views.rollout import rollout_view

    rollout_view(folder).show(store, None, as_json=as_json, watch=watch, url=url)
