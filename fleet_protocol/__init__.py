"""The words both sides speak: messages, topics, blobs, manifests, and the MQTT link that carries
them.
"""
