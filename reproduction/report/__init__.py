"""Writes a table as Markdown, comma-separated values and plots, and the page of all tables."""
