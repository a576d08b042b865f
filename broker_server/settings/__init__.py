"""The configuration of a run: ``fleet.toml`` as frozen values, and its assignment of levels."""
