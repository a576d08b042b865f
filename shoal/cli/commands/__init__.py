"""The commands, one module each: its name is the command's, its docstring the help, its ``app`` what runs.

A module is imported when its command is used or its own help is asked for, so it may import typer and rich and what
is as light; what needs an extra is imported where it is called, inside ``needs``.
"""
