"""The rounds of a run: planning, collecting, folding, merging, judging, coordinating; nothing here knows MQTT."""
