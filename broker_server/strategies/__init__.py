"""The methods, one file per paper; `registry` has a row for each."""

from broker_server.strategies import accumulator

__all__ = ["accumulator"]
