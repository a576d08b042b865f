"""The one command, ``shoal``: parses, calls, prints."""
