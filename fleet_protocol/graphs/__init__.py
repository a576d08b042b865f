"""Graphs before they run: read within bounds, and compared with what the exporter writes."""
