"""Load-tests a server with many light devices, and compares it with the bare broker.

Light devices use the protocol but do not train.
"""
