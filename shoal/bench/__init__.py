"""How a server bears many devices: light ones that speak the protocol but do not train, beside the
bare broker.
"""
