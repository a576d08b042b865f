"""Training virtual devices with PyTorch, many of one tier at a time, to the result that boards get."""
