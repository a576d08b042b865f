"""The stages of an update's way: each module has the code of one kind and states its traits."""
