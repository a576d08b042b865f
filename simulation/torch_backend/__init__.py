"""Trains virtual devices with PyTorch, many of one tier at a time, as boards would."""
