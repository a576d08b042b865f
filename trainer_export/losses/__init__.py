"""Losses, one module each; the row in its table ``LOSSES`` makes it known."""
