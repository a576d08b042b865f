"""The agent on a board: fetches a sub-model, trains it on the board's own data, sends the update
back.

It needs onnxruntime, paho-mqtt, numpy, safetensors, pydantic and, in an enrolled fleet,
cryptography; never torch, onnx or any server package.
"""
