"""The commands, one module each: its name is the command's, and its docstring the help.

What runs is the module's function of that name with an underscore before it, or where there are
several its ``app``.

A module is imported when its command is used or its own help is asked for, so it may import typer
and rich and what is as light; what needs an extra is imported where it is called, inside ``needs``.
"""
