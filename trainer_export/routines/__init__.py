"""The graphs of the routines that a task may ask for, one module each: how it is traced, and what
it is checked by.
"""
