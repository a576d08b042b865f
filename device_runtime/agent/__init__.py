"""The agent: its states, its link to the server, fetching, uploading, the record of its task."""
