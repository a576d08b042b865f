"""The tables of the papers, one module per paper; what runs and compares them is above.

A module here has `EXPERIMENTS`, its tables, and `SECTION`, the section of the specification that describes its method:
`reproduction.catalogue` finds both, and lists tables in the order of the specification.
"""
