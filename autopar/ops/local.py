"""Arguments for local shapes: sizes, offsets and counts that an op takes as numbers."""

from collections.abc import Callable, Mapping
from typing import Any

from autopar.ir.graph import parameters
from autopar.ir.layout import Layout, Shape

from .rule import Call
from .views import window

Arguments = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""Like `Node.args` and `Node.kwargs`."""

Place = Callable[[Call, tuple[Layout, ...], Shape], Mapping[str, Any]]
"""From the layouts of the results and the mesh: arguments, by name, that say which elements a rank produces."""

Local = Callable[[Call, tuple[Shape, ...], tuple[Shape | None, ...]], Arguments]


def unchanged(call: Call, local_inputs: tuple[Shape, ...], local_outputs: tuple[Shape | None, ...]) -> Arguments:
    """Most ops take no sizes."""
    return call.node.args, call.node.kwargs


def replaced(call: Call, **values: Any) -> Arguments:
    """The call's arguments with some replaced, by name."""
    args, kwargs = list(call.node.args), dict(call.node.kwargs)
    for position, parameter in enumerate(parameters(call.node.op)):
        if parameter.name in values:
            if position < len(args):
                args[position] = values[parameter.name]
            else:
                kwargs[parameter.name] = values[parameter.name]
    return tuple(args), tuple(kwargs.items())


def shape_of_output(argument: str) -> Local:
    """The argument is the shape of the result."""

    def local(call: Call, local_inputs: tuple[Shape, ...], local_outputs: tuple[Shape | None, ...]) -> Arguments:
        return replaced(call, **{argument: local_outputs[0]})

    return local


def rows_of_output(argument: str) -> Local:
    """The argument is the size of the first dim of the result."""

    def local(call: Call, local_inputs: tuple[Shape, ...], local_outputs: tuple[Shape | None, ...]) -> Arguments:
        assert local_outputs[0] is not None
        return replaced(call, **{argument: local_outputs[0][0]})

    return local


def window_of_input(call: Call, local_inputs: tuple[Shape, ...], local_outputs: tuple[Shape | None, ...]) -> Arguments:
    """slice: offsets shrink as the operand does."""
    return _window(call, call.inputs[0].shape, local_inputs[0])


def window_of_output(call: Call, local_inputs: tuple[Shape, ...], local_outputs: tuple[Shape | None, ...]) -> Arguments:
    """slice_backward: offsets shrink as the result does, whose shape is an argument."""
    assert local_outputs[0] is not None
    return _window(call, call.output.shape, local_outputs[0], input_sizes=local_outputs[0])


def _window(call: Call, full: Shape, local: Shape, **sizes: Shape) -> Arguments:
    dim = call.argument("dim") % len(full)
    if full[dim] == local[dim]:
        return replaced(call, **sizes)
    start, end = window(call.argument("start"), call.argument("end"), full[dim])
    ranks = full[dim] // local[dim]
    return replaced(call, start=start // ranks, end=end // ranks, **sizes)
