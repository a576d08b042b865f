"""The views of a store that commands show, one module each."""
