"""Data sets by name, and who gets which samples."""
