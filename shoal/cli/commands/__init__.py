"""The commands, one module each: the module's name is the command, its docstring is the help.

The command runs the module's function of that name with an underscore before it, or the module's
``app`` if there are several functions.

A module is imported when its command runs or prints its help, so it may import only light packages
such as typer and rich. Code that needs an extra is imported where it is called, inside ``needs``.
"""
