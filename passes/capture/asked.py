"""What forward asks of torch, or tells it, that a graph cannot hold: refused where it is called, with the line."""

from collections.abc import Callable

from .captured import CaptureError
from .recorder import line_shown


def refusing(message: str) -> Callable[[], None]:
    """What refuses a call, naming the line of the model that makes it."""

    def refuse() -> None:
        raise CaptureError(message.format(line=line_shown()))

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
    "forward reads .grad of a parameter or an input{line}, which holds what earlier steps left there, and a program "
    "would keep what the first call saw: pass it in as an input, or leave it out of forward"
)
WRITING_GRADIENTS = (
    "forward sets .grad of a parameter or an input{line}, where gradients of earlier calls add up: leave that to the "
    "training loop, or compute with torch.autograd.grad, which leaves .grad alone"
)
PACKING = (
    "forward packs sequences by their lengths{line}, and the shapes of a program do not depend on data: run the layer "
    "on the padded sequences, and mask what it makes of the padding"
)
READING_VALUES = (
    "forward reads the values of a tensor{line}, as text (print, an f-string), with numpy or through dlpack, and they "
    "depend on parameters, buffers, random numbers or inputs that were given without values: return the tensor as an "
    "output, and print it or convert it outside of forward"
)
PICKLING = (
    "forward pickles or copies a tensor{line} (pickle, torch.save, copy.copy), and a program would not do so again: "
    "save it outside of forward, and copy with clone(), detach() or copy.deepcopy()"
)
ADDRESSING = (
    "forward asks where a tensor lies in memory{line}, which is elsewhere on each rank: compare tensors with `is`, and "
    "share memory outside of forward"
)
