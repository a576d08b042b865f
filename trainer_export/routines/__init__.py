"""The graphs of the routines of tasks: tracing and checking."""
