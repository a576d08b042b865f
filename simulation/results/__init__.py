"""The results of a simulation: rows per round and device, and plots."""
