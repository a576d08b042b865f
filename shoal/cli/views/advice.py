"""Shows what to do next about a run."""

from collections.abc import Sequence

from broker_server.rounds.advice import Advice
from shoal.cli.console import print_text
from shoal.cli.views.view import View
from shoal.sources import Source


def _read(source: Source, run: str) -> list[Advice]:
    return source.advice(run)


def _draw(rules: Sequence[Advice]) -> None:
    for advice in rules:
        print_text(f"{advice.title}\n  {advice.evidence}\n  {advice.remedy}")
    if not rules:
        print_text("nothing to do: no rule found a problem")


ADVICE = View(_read, _draw)
