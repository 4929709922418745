"""Edits of a PrimFunc that TVM has no statement mutator for, made on its JSON form.

`element_align` before scheduling lets a kernel take tensors at any element-aligned address;
`in_place` after scheduling makes each output buffer its input buffer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import tirx

BUFFER_USES = {"ir.TensorRegion": "source", "tirx.BufferStore": "buffer", "ir.TensorLoad": "source"}
"""Node kind -> its field that refers to a buffer."""


def element_align(func: tirx.PrimFunc, alignment: Callable[[int], int]) -> tirx.PrimFunc:
    """The function with each parameter aligned to alignment(bytes of an element).

    TVM assumes 64 bytes, and its code for CPUs crashes on any other address.
    """
    graph, nodes, root = _graph(func)
    for param in nodes[root["params"]]["data"]:
        buffer = nodes[nodes[param]["data"]["ty"]]["data"]
        buffer["data_alignment"] = alignment(_itemsize(nodes, buffer))
    return tvm.ir.load_json(json.dumps(graph))


def in_place(func: tirx.PrimFunc, suffix: str) -> tirx.PrimFunc:
    """The function whose parameter `x<suffix>` is its parameter `x`, one argument instead of two.

    `noalias=False` would be right on CPUs, but device code stays `__restrict__` and would read
    what it writes through the read-only cache.
    """
    graph, nodes, root = _graph(func)
    params = nodes[root["params"]]["data"]
    names = {_name(nodes, param): param for param in params}
    substitute = {
        param: names[name.removesuffix(suffix)]
        for name, param in names.items()
        if name.endswith(suffix)
    }
    for node in nodes:
        use = BUFFER_USES.get(node["type"])
        if use and node["data"][use] in substitute:
            node["data"][use] = substitute[node["data"][use]]
    nodes[root["params"]]["data"] = [param for param in params if param not in substitute]
    return tvm.ir.load_json(json.dumps(graph))


def _graph(func: tirx.PrimFunc) -> tuple[Any, Any, Any]:
    graph = json.loads(tvm.ir.save_json(func))
    nodes = graph["nodes"]
    return graph, nodes, nodes[graph["root_index"]]["data"]


def _name(nodes: Any, param: int) -> str:
    name = nodes[param]["data"]["name"]
    return str(nodes[name]["data"]) if isinstance(name, int) else str(name)


def _itemsize(nodes: Any, buffer: Any) -> int:
    return int(np.dtype(nodes[buffer["dtype"]]["data"]["dtype"]).itemsize)


def exact_constants(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with each float32 constant that seven digits do not hold given by its bits.

    The source that TVM writes, but for CUDA, has no more digits of a constant: some are off by 4
    units in the last place.
    """
    graph = json.loads(tvm.ir.save_json(func))
    nodes = graph["nodes"]
    none, word, cast, nothing = range(len(nodes), len(nodes) + 4)
    shared: list[Any] = [
        {"type": "None"},
        {"type": "ir.PrimType", "data": {"span": none, "dtype": "int32"}},
        {"type": "ir.Op", "data": "tirx.reinterpret"},
        {"type": "ffi.Array", "data": []},
    ]
    constants = [node for node in nodes if _has_more_digits(nodes, node)]
    nodes += shared
    for node in constants:
        bits = int(np.float32(node["data"]["value"]).view(np.int32))
        value, number, arguments = range(len(nodes), len(nodes) + 3)
        nodes += [
            {"type": "int", "data": bits},
            {"type": "ir.IntImm", "data": {"span": none, "ty": word, "value": value}},
            {"type": "ffi.Array", "data": [number]},
        ]
        call = {"span": none, "ty": node["data"]["ty"], "op": cast, "args": arguments}
        node["type"], node["data"] = "ir.Call", {**call, "attrs": none, "ty_args": nothing}
    return tvm.ir.load_json(json.dumps(graph))


def _has_more_digits(nodes: Any, node: Any) -> bool:
    if node["type"] != "ir.FloatImm" or nodes[node["data"]["ty"]]["data"]["dtype"] != "float32":
        return False
    value = np.float32(node["data"]["value"])
    return bool(np.isfinite(value)) and np.float32(f"{value:.6e}") != value


def on_stack(module: tvm.IRModule) -> tvm.IRModule:
    """The lowered module with each buffer of a constant size on the stack.

    TVM takes those of 1 KiB or more, such as a moment of a block of 256, from a pool, once a block,
    and two threads wait for each other there: 4-bit AdamW took 0.88 ns a parameter, not 0.53.
    """
    graph = json.loads(tvm.ir.save_json(module))
    nodes = graph["nodes"]
    key, none, dtype, one, value, annotations = range(len(nodes), len(nodes) + 6)
    for node in list(nodes):
        if node["type"] == "tirx.AllocBuffer" and _has_constant_size(nodes, node["data"]["buffer"]):
            node["data"]["annotations"] = annotations
    nodes += [
        {"type": "ffi.String", "data": "disable_lower_builtin"},
        {"type": "None"},
        {"type": "ir.PrimType", "data": {"span": none, "dtype": "bool"}},
        {"type": "int", "data": 1},
        {"type": "ir.IntImm", "data": {"span": none, "ty": dtype, "value": one}},
        {"type": "ffi.Map", "data": [key, value]},
    ]
    return tvm.ir.load_json(json.dumps(graph))


def _has_constant_size(nodes: Any, buffer: int) -> bool:
    shape = nodes[nodes[nodes[buffer]["data"]["ty"]]["data"]["shape"]]["data"]
    return all(nodes[extent]["type"] == "ir.IntImm" for extent in shape)
