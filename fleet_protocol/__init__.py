"""The code that server and boards share: messages, topics, blobs, manifests, and the MQTT link."""
