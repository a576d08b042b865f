"""The methods, one file per paper; `registry` has a row for each."""

from broker_server.strategies import accumulator, heterofl

__all__ = ["accumulator", "heterofl"]
