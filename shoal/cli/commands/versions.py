"""List the global versions of a run, with what they were judged.

`shoal export-weights` takes one.
"""

from shoal.cli.listing import listing

app = listing("VERSIONS", __doc__)
