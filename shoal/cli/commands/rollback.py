"""Let the next round start from an earlier global version; nothing is deleted."""

from shoal.cli.commands.promote import choosing

app = choosing("roll_back", __doc__)
