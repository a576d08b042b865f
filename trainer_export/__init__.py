"""Exports PyTorch models as graphs that train, evaluate and predict, for every sub-model shape."""
