"""Resume a paused run.

Example: shoal resume
"""

from shoal.cli.commands.pause import steering

_resume = steering("resume", "continues")
