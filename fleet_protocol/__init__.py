"""What server and boards share: messages, topics, blobs, manifests, and the link over MQTT."""
