"""Functions of PyTorch that a trace writes in other ones, which have a lowering and a gradient.

One file per kind.
"""
