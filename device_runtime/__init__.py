"""The agent on a board: fetches a sub-model, trains it on the board's own data, sends the update back.

It needs onnxruntime, paho-mqtt, numpy, safetensors and pydantic; never torch, onnx or any server package.
"""
