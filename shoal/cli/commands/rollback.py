"""Let the next round start from an earlier global version; nothing is deleted."""

from shoal.cli.commands.promote import choosing

_rollback = choosing("rollback")
