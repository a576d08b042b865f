"""Budgets of speed and memory, each a ratio measured in one run."""
