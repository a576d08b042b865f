"""Losses; a module registers its own in its table ``LOSSES``."""
