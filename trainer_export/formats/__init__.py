"""The formats of exported graphs, one module each."""
