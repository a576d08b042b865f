"""Measures how a server bears many light devices, beside the bare broker.

They speak the protocol but do not train.
"""
