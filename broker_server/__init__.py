"""The server of a fleet: rounds, strategies, merging, the store, the blob service and an embedded
broker.
"""
