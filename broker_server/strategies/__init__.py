"""The methods, one file per paper, with its rows in `STRATEGIES`; `registry` joins these rows."""

from broker_server.strategies import accumulator, heterofl

__all__ = ["accumulator", "heterofl"]
