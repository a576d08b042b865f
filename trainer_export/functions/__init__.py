"""PyTorch functions that a trace replaces by others, which have a lowering and a gradient.

Each module has a table ``FUNCTIONS`` by function of PyTorch. An entry returns NotImplemented if the
function needs no replacement.
"""
