"""Predictions on the board, without a network or over it, of the newest model it has."""
