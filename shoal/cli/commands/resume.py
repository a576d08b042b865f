"""Resume a run that is paused.

Example: shoal resume
"""

from shoal.cli.commands.pause import steering

_resume = steering("resume", "goes on")
