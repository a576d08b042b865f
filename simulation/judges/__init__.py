"""What a simulation judges beyond accuracy: own samples, perplexity, correlation."""
