"""The losses; each module registers its losses in its table ``LOSSES``."""
