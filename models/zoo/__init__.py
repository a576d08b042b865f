"""The architectures that come with Shoal, one family per module.

This package, and no other of `models`, uses torch.

A module here that defines an architecture is found by `models.registry.Registry.zoo`; no list names
it.
"""
