"""The agent on a board: it fetches a sub-model, trains it on the board's data, sends the update.

It needs onnxruntime, paho-mqtt, numpy, safetensors, pydantic and, in an enrolled fleet,
cryptography; never torch, onnx or any server package.
"""
