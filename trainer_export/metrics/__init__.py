"""Metrics; a module registers its own in its table ``METRICS``."""
