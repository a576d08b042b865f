"""Trains virtual devices with PyTorch, many of one tier at a time, with the results of boards."""
