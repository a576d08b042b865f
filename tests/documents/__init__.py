"""What writes the documents that are made from the code: `make docs`."""
