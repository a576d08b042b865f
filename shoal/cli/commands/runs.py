"""List the runs of a store, newest first."""

from shoal.cli.listing import listing

app = listing("RUNS", __doc__)
