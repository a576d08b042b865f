"""The agent: its states, the link to the server, fetching and uploading, and the record of the task
in hand.
"""
