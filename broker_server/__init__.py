"""The server of a fleet: rounds, strategies, merging, the store, and the service around them."""
