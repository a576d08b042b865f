"""The tables of the papers as data: a file each, with shared settings and published numbers."""
