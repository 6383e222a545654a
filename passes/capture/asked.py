"""What forward asks of torch, or tells it, that a graph cannot hold: refused where it is called, with the line."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar import compat

from .captured import CaptureError
from .looks import is_library, line_of_model


class Functions(TorchFunctionMode):
    """Refuses what acts on gradients outside of the graph, and takes note of the storages of real tensors whose numbers
    Python asks for."""

    def __init__(self, valued: set[int]) -> None:
        super().__init__()
        self.valued = valued

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        asked = name == "is_inference" or (func == _GRAD.__get__ and args[0].is_leaf and args[0].requires_grad)
        if asked and not is_library(sys._getframe(1).f_code.co_filename):
            message = ASKING if name == "is_inference" else READING_GRADIENTS
            raise CaptureError(message.format(line=line_of_model()))
        if name == "_pack_padded_sequence":
            raise CaptureError(
                f"forward packs sequences by their lengths{line_of_model()}, and the shapes of a program do not depend "
                f"on data: run the layer on the padded sequences, and mask what it makes of the padding"
            )
        if name in _VALUES and compat.is_real(args[0]):
            self.valued.add(compat.memory_of(args[0]))
        return func(*args, **(kwargs or {}))


_VALUES = frozenset({"item", "tolist", "numpy", "__int__", "__float__", "__bool__", "__index__", "__complex__"})
_GRAD: Any = torch.Tensor.grad


def refusing(message: str) -> Callable[[], None]:
    """What refuses a call, naming the line of the model that makes it."""

    def refuse() -> None:
        raise CaptureError(message.format(line=line_of_model()))

    return refuse


SEEDING = (
    "forward seeds torch's generator, or sets its state{line}: a program's random operators draw by the step's seed. "
    "Seed outside"
)
ASKING = (
    "forward asks torch.is_inference_mode_enabled(){line}, and a program is the same within inference mode and "
    "outside: ask self.training or torch.is_grad_enabled(), for which the module has a program each"
)
READING_GRADIENTS = (
    "forward reads .grad of a leaf{line}, which holds what earlier steps left there, and a program would keep what the "
    "first call saw: pass it in as an input, or leave it out of forward"
)
