"""Predictions of the board's newest model, on the board or over the network."""
