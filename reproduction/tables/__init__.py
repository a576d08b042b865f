"""The tables of the papers as data: a file each, files of what several have in common, and
published numbers.
"""
