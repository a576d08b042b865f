"""Fields of ONNX's messages that the exporter writes, by their numbers in ``onnx.proto``.

Every other field of the format (external data, functions, sparse tensors, training information) is
absent from these tables, so `wire.read` refuses it.
"""

from fleet_protocol.graphs.wire import BYTES, FLOAT, NUMBER, Field

MODEL = {
    1: Field("ir_version", NUMBER),
    2: Field("producer_name", BYTES),
    3: Field("producer_version", BYTES),
    7: Field("graph", BYTES),
    8: Field("opset_import", BYTES, many=True),
    14: Field("metadata_props", BYTES, many=True),
}
OPSET = {1: Field("domain", BYTES), 2: Field("version", NUMBER)}
GRAPH = {
    1: Field("node", BYTES, many=True),
    2: Field("name", BYTES),
    5: Field("initializer", BYTES, many=True),
    11: Field("input", BYTES, many=True),
    12: Field("output", BYTES, many=True),
    13: Field("value_info", BYTES, many=True),
}
NODE = {
    1: Field("input", BYTES, many=True),
    2: Field("output", BYTES, many=True),
    3: Field("name", BYTES),
    4: Field("op_type", BYTES),
    5: Field("attribute", BYTES, many=True),
    6: Field("doc_string", BYTES),
    7: Field("domain", BYTES),
}
ATTRIBUTE = {
    1: Field("name", BYTES),
    2: Field("f", FLOAT),
    3: Field("i", NUMBER),
    4: Field("s", BYTES),
    5: Field("t", BYTES),
    6: Field("g", BYTES),
    7: Field("floats", FLOAT, many=True, packed=True),
    8: Field("ints", NUMBER, many=True, packed=True),
    9: Field("strings", BYTES, many=True),
    20: Field("type", NUMBER),
}
TENSOR = {
    1: Field("dims", NUMBER, many=True, packed=True),
    2: Field("data_type", NUMBER),
    4: Field("float_data", FLOAT, many=True, packed=True),
    5: Field("int32_data", NUMBER, many=True, packed=True),
    7: Field("int64_data", NUMBER, many=True, packed=True),
    8: Field("name", BYTES),
    9: Field("raw_data", BYTES),
}
VALUE = {1: Field("name", BYTES), 2: Field("type", BYTES)}
TYPE = {1: Field("tensor_type", BYTES)}
TENSOR_TYPE = {1: Field("elem_type", NUMBER), 2: Field("shape", BYTES)}
SHAPE = {1: Field("dim", BYTES, many=True)}
DIMENSION = {1: Field("value", NUMBER), 2: Field("param", BYTES)}

# Values of AttributeProto.AttributeType.
TENSOR_ATTRIBUTE = 4
GRAPH_ATTRIBUTE = 5
GRAPHS_ATTRIBUTE = 10

# Values of TensorProto.DataType.
FLOAT32 = 1
INT32 = 6
INT64 = 7
BOOL = 9
