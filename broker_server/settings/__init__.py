"""What a run is told: ``fleet.toml`` as frozen values, and the assignment of levels that it names."""
