"""Graphs as a board sees them before it runs them: read within bounds, and held against what the
exporter writes.
"""
