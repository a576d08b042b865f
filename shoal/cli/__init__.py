"""The command ``shoal``: it parses options, calls the library and prints results."""
