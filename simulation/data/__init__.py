"""Data sets by name, and their partition among devices."""
