"""The metrics; each module registers its metrics in its table ``METRICS``."""
