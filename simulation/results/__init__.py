"""What a simulation leaves: rows per round and device, and plots."""
