"""One module per format that graphs are written in."""
