"""Training on the board: data, backends and the work of a task; nothing here depends on MQTT."""
