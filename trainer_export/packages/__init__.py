"""Models of other packages, exported as they are: their sizes are found, and their call is adapted.

`package_model` reads a SPEC and returns how the model is built. `discover_axes` finds out which
arguments of its constructor are widths, heads, groups or a depth.
"""
