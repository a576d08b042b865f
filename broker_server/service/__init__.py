"""The service around the rounds: the connection, what comes in, blobs, uploads, the broker,
starting and ending.
"""
