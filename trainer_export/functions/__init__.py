"""Functions of PyTorch that a trace writes as others, which have a lowering and a gradient.

Each module has a table ``FUNCTIONS``, by the function of PyTorch. An entry returns NotImplemented
where the function can stay as it is.
"""
