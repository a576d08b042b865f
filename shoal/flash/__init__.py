"""Prepares boards: the files that they need, and how these are packed."""
