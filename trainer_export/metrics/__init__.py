"""Metrics, one module each; the row in its table ``METRICS`` makes it known."""
