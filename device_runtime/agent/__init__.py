"""The agent: its states, its link to the server, downloads, uploads and its task record."""
