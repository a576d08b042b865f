"""The page and its API: what a store holds, for a browser and for programs."""
