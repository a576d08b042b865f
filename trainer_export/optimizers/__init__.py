"""The optimizers; each module registers its optimizers in its table ``OPTIMIZERS``."""
