"""Shoal's architectures, one family per module.

Only this package of `models` uses torch.

`models.registry.Registry.zoo` finds all modules here that define an architecture.
"""
