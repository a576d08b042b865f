"""Shows what to do next about a run."""

from collections.abc import Sequence

from broker_server.rounds.advice import Advice
from shoal.cli.console import say
from shoal.cli.views.view import View
from shoal.sources import Source


def _read(source: Source, run: str) -> list[Advice]:
    return source.advice(run)


def _draw(rules: Sequence[Advice]) -> None:
    for advice in rules:
        say(f"{advice.title}\n  {advice.evidence}\n  {advice.remedy}")
    if not rules:
        say("nothing: no rule finds anything wrong")


ADVICE = View(_read, _draw)
