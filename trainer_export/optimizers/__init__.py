"""Optimizers; a module registers its own in its table ``OPTIMIZERS``."""
