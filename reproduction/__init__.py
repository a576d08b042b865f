"""The papers held against this code: their tables run again."""
