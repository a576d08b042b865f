"""The rounds of a run: planning, collecting, folding, merging, judging, coordinating.

Nothing here knows MQTT.
"""
