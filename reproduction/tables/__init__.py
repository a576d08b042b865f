"""The tables of the papers as data: one file each, with shared settings and published numbers."""
