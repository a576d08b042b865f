"""PyTorch to train, eval, statistics and infer graphs for every sub-model shape, checked and
stored.
"""
