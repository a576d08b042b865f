"""The graphs of the routines that a task may ask for: how each is traced and checked."""
