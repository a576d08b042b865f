"""The rounds of a run: planning, collecting, folding, merging, evaluating, coordinating.

Nothing here depends on MQTT.
"""
