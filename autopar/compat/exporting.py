"""Parts of torch that are replaced while a model is exported: the same results, in operators that a graph can hold."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from .patching import patched
from .regions import Regions, plain_checkpoints
from .tensors import stand_in, storage_span


@contextlib.contextmanager
def as_exported() -> Iterator[None]:
    """Within it modules take the branches that they take while they are exported."""
    from torch._export.utils import _compiling_state_context

    with _compiling_state_context(), as_captured():
        yield


@contextlib.contextmanager
def as_captured() -> Iterator[Regions]:
    """Within it the parts of torch below run in ways that a graph can hold. Gives the regions of checkpoints."""
    with (
        _masks_as_they_are(),
        _averaged_norms(),
        plain_checkpoints() as regions,
        _regions_within_regions(),
        _settled_modules(),
        causal_biases(),
    ):
        yield regions


def _regions_within_regions() -> contextlib.AbstractContextManager[None]:
    """Within it `torch.export` keeps a change of grad mode that stands in a region with autocast. Its pass that makes
    regions without gradients splits a graph at such a change, enters autocast again at the head of the piece, and then
    does not find the change there, which is lost without a word."""
    from torch._export.passes import replace_set_grad_with_hop_pass

    passes: Any = replace_set_grad_with_hop_pass
    original = passes.replace_set_grad_with_hop_pass

    def replace_set_grad(module: fx.GraphModule, signature: Any) -> Any:
        _close_autocast_where_grad_changes(module.graph)
        return original(module, signature)

    return patched(passes, "replace_set_grad_with_hop_pass", replace_set_grad)


def _close_autocast_where_grad_changes(graph: fx.Graph) -> None:
    """Autocast is left before each change of grad mode and entered again after it."""
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

    around: list[fx.Node] = []  # what is entered where a node stands, the outermost first
    entered: dict[fx.Node, fx.Node] = {}  # how it is entered there
    for node in list(graph.nodes):
        if node.target is _enter_autocast:
            around.append(node)
            entered[node] = node
        elif node.target is _exit_autocast:
            first = node.args[0]
            assert isinstance(first, fx.Node)
            around.remove(first)
            node.args = (entered.pop(first),)
        elif node.target is torch._C._set_grad_enabled and around:
            with graph.inserting_before(node):
                for first in reversed(around):
                    graph.call_function(_exit_autocast, (entered[first],)).meta = {**first.meta}
            place = node
            for first in around:
                with graph.inserting_after(place):
                    place = entered[first] = graph.call_function(_enter_autocast, first.args, first.kwargs)
                    place.meta = {**first.meta}


def _settled_modules() -> contextlib.AbstractContextManager[None]:
    """`module.to(dtype)` in forward does nothing where the module is so already (the router of Switch Transformers);
    by itself it swaps every parameter of fakes."""

    def settled(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        with torch.no_grad():
            for name, tensor in (*self.named_parameters(recurse=recurse), *self.named_buffers(recurse=recurse)):
                converted = fn(tensor)
                if converted is not tensor and storage_span(converted) != storage_span(tensor):
                    was, now = (f"{t.dtype} on {t.device}" for t in (tensor, converted))
                    raise ValueError(
                        f"forward converts {name} of a {type(self).__name__} from {was} to {now}, which a program does "
                        f"not write: convert the module before, outside of forward"
                    )
        return self

    return patched(nn.Module, "_apply", settled)


def plain_lstm() -> contextlib.AbstractContextManager[None]:
    """An LSTM is its steps, on every device and in every dtype. In float32 on a CPU torch would make one operator of a
    layer, of which no dim can be split and whose backward has results that are None."""
    from torch._decomp import decompositions

    return patched(decompositions, "select_one_layer_lstm_function", lambda *_: decompositions.one_layer_lstm)


def _averaged_norms() -> contextlib.AbstractContextManager[None]:
    """`BatchNorm(momentum=None)` keeps the plain average of what it has seen, whose factor is a number that it reads
    off a buffer. Here that is arithmetic on the buffer."""
    from torch.nn.modules.batchnorm import _BatchNorm

    forward = _BatchNorm.forward

    def averaged(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
        count, mean, var = self.num_batches_tracked, self.running_mean, self.running_var
        if self.momentum is not None or not self.training or count is None or mean is None or var is None:
            return forward(self, input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        now_mean, now_var = mean.clone(), var.clone()
        result = nn.functional.batch_norm(input, now_mean, now_var, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            count.add_(1)
            for running, now in ((mean, now_mean), (var, now_var)):
                share = 1.0 / count.to(running.dtype)
                running.copy_((1.0 - share) * running + share * now)
        return result

    return patched(_BatchNorm, "forward", averaged)


def _masks_as_they_are() -> contextlib.AbstractContextManager[None]:
    """`nn.TransformerEncoder` compares the mask that it is given with the causal one, to give attention a hint: a
    branch on data, with and without which the result is the same."""
    from torch.nn.modules import transformer

    return patched(transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True)


def causal_biases() -> contextlib.AbstractContextManager[None]:
    """Within it a causal bias of torch may be made under any modes. It is an empty tensor of its class, which torch
    cannot make where tensors are to be fakes, or watched."""
    from torch.nn.attention.bias import CausalBias

    return patched(CausalBias, "__new__", lambda kind, *_, **named: stand_in(kind))


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which ops take their operands as they are."""
    if not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` as matrix products and a softmax, on any device."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
    attended, _ = torch.ops.aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    result: torch.Tensor = attended
    return result
