"""Raw columns as the inputs of an ONNX program: one input per column, encoded by nodes before those of the network.

Numbers are float tensors, text is a string tensor, both of shape samples x 1, as scikit-learn's converter has them. A gap is
NaN, or an empty text; a category that is not known sets none of the features of its column.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedme.core.atomic_files import RunError
from fedme.datasets.data_files import require_package
from fedme.datasets.table_columns import Column

INNER = "network/"  # before the names of the network's own nodes and tensors, so that a column may have any name


def is_text(column: Column) -> bool:
    """Whether an input is text: a column with a category that is not a number."""
    return column.categories is not None and not all(_is_number(category) for category in column.categories if category)


def column_types(columns: Sequence[Column]) -> str:
    """The inputs, in order, as JSON: their names and whether they are numbers or text."""
    return json.dumps([{"name": column.name, "type": "text" if is_text(column) else "number"} for column in columns])


def with_columns(model: Any, columns: Sequence[Column]) -> Any:
    """The program of a network on the matrix of a table, with the columns of the table as its inputs."""
    onnx = require_package("onnx", "ONNX", "export")
    compose = require_package("onnx.compose", "ONNX", "export")
    outputs = [output.name for output in model.graph.output]
    if clash := [column.name for column in columns if column.name in outputs]:
        raise RunError(f"the column '{clash[0]}' has the name of the output of the program; rename the column")
    model = compose.add_prefix(model, INNER, rename_outputs=False)
    graph, helper, types = model.graph, onnx.helper, onnx.TensorProto
    (matrix,) = graph.input
    nodes, parts, constants = [], [], []

    def constant(name: str, values: np.ndarray) -> str:
        constants.append(onnx.numpy_helper.from_array(values, name))
        return name

    def node(kind: str, inputs: Sequence[str], output: str, **options: Any) -> str:
        nodes.append(helper.make_node(kind, list(inputs), [output], **options))
        return output

    axis = constant("columns/axis", np.array([1], dtype=np.int64))
    for number, column in enumerate(columns):
        at, categories = f"columns/{number}", column.categories
        if categories is None:
            parts.append(column.name)
        elif is_text(column):
            encoded = node("OneHotEncoder", [column.name], f"{at}/each", domain="ai.onnx.ml", cats_strings=categories, zeros=1)
            parts.append(node("Squeeze", [encoded, axis], f"{at}/features"))
        else:
            known = np.array([[float(category) if category else np.nan for category in categories]], dtype=np.float32)
            same = node("Equal", [column.name, constant(f"{at}/categories", known)], f"{at}/same")
            if "" in categories:
                empty = node("IsNaN", [column.name], f"{at}/empty")
                place = constant(f"{at}/place", np.array([[category == "" for category in categories]]))
                same = node("Or", [same, node("And", [empty, place], f"{at}/gap")], f"{at}/any")
            parts.append(node("Cast", [same], f"{at}/features", to=types.FLOAT))
    dtype = matrix.type.tensor_type.elem_type
    joined = node("Concat", parts, "columns/matrix", axis=1)
    node("Cast", [joined], matrix.name, to=dtype)
    samples = matrix.type.tensor_type.shape.dim[0].dim_param
    inputs = [
        helper.make_tensor_value_info(column.name, types.STRING if is_text(column) else types.FLOAT, [samples, 1])
        for column in columns
    ]
    before = list(graph.node)
    del graph.node[:], graph.input[:]
    graph.node.extend([*nodes, *before])
    graph.input.extend(inputs)
    graph.initializer.extend(constants)
    if not any(opset.domain == "ai.onnx.ml" for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    onnx.checker.check_model(model)
    return model


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
