"""The states of the agent, each an object that lives from entry to exit."""
