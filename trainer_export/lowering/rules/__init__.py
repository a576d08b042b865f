"""Lowerings of torch operators, one module per kind; the table ``LOWERINGS`` of each is found by itself."""
