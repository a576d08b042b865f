"""Training on the board: data, backends, and what a task asks of them; nothing here knows MQTT."""
