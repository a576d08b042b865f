"""Simulates many virtual devices without a network, with shared data sets and partitions."""
