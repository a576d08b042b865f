"""Lowerings of torch operators, one module per kind.

The table ``LOWERINGS`` of each module is found automatically.
"""
