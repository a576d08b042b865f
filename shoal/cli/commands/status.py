"""Show how a run stands."""

from shoal.cli.listing import listing

app = listing("STATUS", __doc__)
