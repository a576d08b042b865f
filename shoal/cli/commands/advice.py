"""Show what to do next about a run, with the evidence."""

from shoal.cli.listing import listing

app = listing("ADVICE", __doc__)
