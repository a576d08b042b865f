"""Optimizers, one module each; the row in its table ``OPTIMIZERS`` makes it known."""
