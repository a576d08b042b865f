"""Start the next round from an earlier global version; nothing is deleted.

Example: shoal rollback 40
"""

from shoal.cli.commands.promote import choosing

_rollback = choosing("rollback")
