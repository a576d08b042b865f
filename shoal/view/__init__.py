"""The page of a store and its API."""
