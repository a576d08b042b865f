"""The server of a fleet: rounds, strategies, aggregation, store, and the service around them."""
