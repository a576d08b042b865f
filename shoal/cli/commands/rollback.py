"""Let the next round start from an earlier global version; nothing is deleted."""

from shoal.cli.commands.promote import choosing

__all__ = ["app"]

app = choosing("roll_back", __doc__)
