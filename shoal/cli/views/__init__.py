"""What commands show of a store, one module for each view."""
