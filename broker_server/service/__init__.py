"""The service around the rounds: connection, messages, blobs, uploads, broker, start and end."""
