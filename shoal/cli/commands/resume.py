"""Go on with a run that is held."""

from shoal.cli.commands.pause import steering

_resume = steering("resume", "goes on")
