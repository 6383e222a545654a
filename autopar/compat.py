"""The one file that touches private torch API. It serves torch 2.11, 2.12 and 2.13.

Everything here is thin: a name of ours for something of torch's that may move between versions.
Importing it under another torch raises `ImportError`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

SERVED = ("2.11", "2.12", "2.13")

if ".".join(torch.__version__.split(".")[:2]) not in SERVED:
    raise ImportError(
        f"autopar serves torch {', '.join(SERVED)} and this is torch {torch.__version__}: install one of those"
    )


# ---------------------------------------------------------------------------------------------- profiler


def is_profiling() -> bool:
    """Whether a `torch.profiler` records in this process."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


# ---------------------------------------------------------------------------------------------- fake tensors


class WritesReal(Exception):
    """An operator of a traced model writes a tensor that is neither of the traced copy nor made by it."""

    def __init__(self, op: str, tensor: torch.Tensor) -> None:
        super().__init__(f"{op} writes a tensor that is not a buffer of the model")
        self.op, self.tensor = op, tensor


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a call of an operator writes."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return list(pytree.tree_leaves(given))


@contextlib.contextmanager
def suspended_in_branches(context: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """A context that is left while Dynamo traces the branches of `torch.cond`, and entered again after it."""
    from torch._higher_order_ops import utils

    compiled = getattr(utils, "_hop_compile_and_call", None)
    if compiled is None:
        with context():
            yield
        return
    entered = [context()]

    def outside(*args: Any, **kwargs: Any) -> Any:
        entered.pop().__exit__(None, None, None)
        try:
            return compiled(*args, **kwargs)
        finally:
            entered.append(context())
            entered[-1].__enter__()

    entered[-1].__enter__()
    utils._hop_compile_and_call = outside
    try:
        yield
    finally:
        utils._hop_compile_and_call = compiled
        entered.pop().__exit__(None, None, None)


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that looks at operators and leaves them as they are. Dynamo, which traces the branches of `torch.cond`,
    works under it as without."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True


class _Kernels(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fakes with the dtypes that CPU kernels give. torch 2.13 has others for norms of a bfloat16 or float16 input
    beside wider weights, as autocast makes them, and for running statistics in these dtypes."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = super().dispatch(func, types, args, kwargs)
        if not isinstance(results, tuple) or not any(isinstance(r, torch.Tensor) and r.is_cpu for r in results):
            return results
        wanted = _norm_dtypes(str(func), args)
        return tuple(
            result
            if dtype is None or result is None or result.dtype == dtype
            else super(_Kernels, self).dispatch(torch.ops.aten._to_copy.default, types, (result,), {"dtype": dtype})
            for result, dtype in itertools.zip_longest(results, wanted[: len(results)])
        )


def _control_flow() -> None:
    """Control flow on `_Kernels` is what it is on any fakes: torch looks for the very class."""
    from torch._higher_order_ops.cond import cond_op

    cond_op.py_impl(_Kernels)(cond_op.python_key_table[FakeTensorMode])


_control_flow()


def _norm_dtypes(op: str, args: Any) -> list[torch.dtype | None]:
    """The dtypes of a norm's results, None where the fakes are right."""
    if op in ("aten.native_layer_norm.default", "aten.native_group_norm.default"):
        weight = args[2] if "layer" in op else args[1]
        return [None, *[_wider(args[0], weight)] * 2]
    if op.startswith(("aten.native_batch_norm.", "aten._native_batch_norm_legit")) and "no_training" not in op:
        running = args[3:5] if isinstance(args[3], torch.Tensor) else (None, None)
        return [None, *[_wider(args[0], args[1])] * 2, *(None if r is None else r.dtype for r in running)]
    if op == "aten.native_group_norm_backward.default":
        return [args[1].dtype, *[_wider(args[1], args[4])] * 2]
    return []


def _wider(x: torch.Tensor, weight: torch.Tensor | None) -> torch.dtype:
    return x.dtype if weight is None or weight.dtype.itemsize < x.dtype.itemsize else weight.dtype


def _meta_kernels() -> None:
    """Shapes of gradients of random numbers, which torch has for real devices alone."""
    for op in ("_standard_gamma_grad", "_dirichlet_grad"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "Meta"):
            torch.library.impl(f"aten::{op}", "Meta")(lambda first, *_: torch.empty_like(first))


_meta_kernels()


def number_of(tensor: torch.Tensor) -> Any:
    """The number that a real tensor of one element holds, whatever modes are active."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return tensor.item()


VALUES_MOST = 1 << 16


def value_of(tensor: torch.Tensor) -> bytes | None:
    """What a small real tensor holds; None for others."""
    from torch.utils._python_dispatch import _disable_current_modes

    if not is_real(tensor) or tensor.numel() > VALUES_MOST:
        return None
    with _disable_current_modes(), torch.no_grad():
        return repr(tensor.tolist()).encode()


def fake_mode() -> FakeTensorMode:
    """A fresh mode under which tensors have shapes and no data. Real tensors that a model closes
    over are let in (and become constants of the graph)."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return _Kernels(allow_non_fake_inputs=True, shape_env=ShapeEnv(), export=True)


@contextlib.contextmanager
def unmodified() -> Iterator[None]:
    """Within it operators on real tensors run as they are, whatever modes are active."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def stand_in(kind: type[Any]) -> Any:
    """An empty tensor of a subclass, whatever modes are active: fakes are of no class but their own."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return torch.empty(0).as_subclass(kind)


def is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


def decides_by_data(error: Exception) -> bool:
    """Whether tracing stopped where Python code asks for a value of a tensor: a branch, an index, a size."""
    # the other is what indexing by a tensor without data says
    return isinstance(error, GuardOnDataDependentSymNode) or "its data is not allocated yet" in str(error)


def leaves_numbers(error: Exception) -> bool:
    """Whether tracing stopped since a number that was read of a tensor is known to nobody."""
    return "nbacked symbol" in str(error) or "SymInt" in str(error) or "data dependent" in str(error).lower()


def is_real(tensor: torch.Tensor) -> bool:
    """Whether it has values."""
    return not is_fake(tensor) and tensor.device.type != "meta"


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a strided tensor without a subclass of behaviour: real, meta or fake."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(tensor, nn.Buffer) or is_fake(tensor)
    return plain and tensor.layout is torch.strided and not tensor.is_quantized


def storage_span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(identity of the storage, first byte, byte after the last one) of a strided tensor."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    first = int(tensor.storage_offset())
    return tensor.untyped_storage()._cdata, first * tensor.itemsize, (first + int(extent)) * tensor.itemsize


def memory_of(tensor: torch.Tensor) -> int:
    """Identity of the storage."""
    return int(tensor.untyped_storage()._cdata)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is under `torch.compile`: Dynamo would follow it into planning."""
    reason = "a parallel module is compiled already: what it runs is its program"
    disabled: Callable[..., Any] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return disabled


def version(tensor: torch.Tensor) -> int:
    """How often it has been written in place. That of a DTensor counts writes that its local tensor's does not."""
    return tensor._version


def shell(dtensor: DTensor) -> int:
    """Identity of the storage that stands for a DTensor's in its outer tensor, which holds nothing: another one after
    `dtensor.data = ...`, of which the local tensor learns nothing."""
    return int(dtensor.untyped_storage()._cdata)


def is_observed(tensor: torch.Tensor) -> bool:
    """Whether somebody wants to see its gradient: by a hook, or by `retain_grad()`."""
    return bool(tensor._backward_hooks) or bool(tensor.retains_grad and not tensor.is_leaf)


def take_notes(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Give a tensor the attributes that people set on another (a scale, a group), which forward may read."""
    vars(tensor).update({name: value for name, value in notes_of(source).items() if name not in vars(tensor)})


def notes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Attributes that people set on a tensor."""
    own = vars(_bare_fake()) if is_fake(tensor) else {}
    return {name: value for name, value in vars(tensor).items() if name not in own and not is_torchs(name)}


def is_torchs(name: str) -> bool:
    """Whether torch itself sets such an attribute on tensors that it traces."""
    return name.endswith("_memo") or name.startswith("_dynamo_")


@cache
def _bare_fake() -> torch.Tensor:
    with FakeTensorMode():
        return nn.Parameter(torch.empty(()))


def by_tensor() -> MutableMapping[torch.Tensor, Any]:
    """A dictionary of tensors, by identity, that keeps none of them alive."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


# ---------------------------------------------------------------------------------------------- hooks and seeds


def hooks_gradient(tensor: torch.Tensor) -> bool:
    """Whether hooks wait for its gradient."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def hooks_gradients(module: nn.Module) -> bool:
    """Whether it has full backward hooks or full backward pre-hooks."""
    return bool(module._backward_hooks) or bool(module._backward_pre_hooks)


def hook_registries(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Where a module keeps its hooks: those of forward, and then those of backward."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def global_forward_hooks() -> dict[str, dict[int, Any]]:
    """The hooks that run before and after the forward of every module."""
    from torch.nn.modules import module

    return {
        "the global forward hooks": module._global_forward_hooks,
        "the global forward pre-hooks": module._global_forward_pre_hooks,
    }


def global_backward_hooks() -> str:
    """What kind of hooks torch has for the backward of every module; empty where it has none."""
    from torch.nn.modules import module

    if module._global_backward_pre_hooks:
        return "global full backward pre-hooks"
    return "global backward hooks" if module._global_backward_hooks else ""


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors are what they are, while a model is traced too."""
    from torch.utils._python_dispatch import _disable_current_modes

    stack = contextlib.ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(torch.inference_mode(False))
    return stack


class _Seeded:
    """Torch's default generator, but for seeds."""

    def __init__(self, generator: torch.Generator, seeded: Callable[[], None]) -> None:
        self._generator, self._seeded = generator, seeded

    def manual_seed(self, seed: int) -> torch.Generator:
        self._seeded()
        return self._generator.manual_seed(seed)

    def seed(self) -> int:
        self._seeded()
        return self._generator.seed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


@contextlib.contextmanager
def seeding(seeded: Callable[[], None]) -> Iterator[None]:
    """Within it `seeded` is called where torch's own generator is given a seed."""
    holder: Any = torch.random
    known = holder.default_generator
    holder.default_generator = _Seeded(known, seeded)
    try:
        yield
    finally:
        holder.default_generator = known


@contextlib.contextmanager
def saving(saved: Callable[[], None]) -> Iterator[None]:
    """Within it `saved` is called where hooks are set on what autograd saves (not those of torch itself)."""
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    known = hooks.__enter__

    def enter(self: Any) -> None:
        if type(self) is hooks:
            saved()
        known(self)

    hooks.__enter__ = enter
    try:
        yield
    finally:
        hooks.__enter__ = known


# ---------------------------------------------------------------------------------------------- joint export


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """What an input of a joint graph is. `index` counts parameters, buffers (constants included) or
    inputs; for a tangent it is the index of the output that it belongs to."""

    node: fx.Node
    kind: Literal["parameter", "buffer", "input", "tangent"]
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What an output of a joint graph is. `node` is None where there is none (no gradient)."""

    node: fx.Node | None
    kind: Literal["output", "mutation", "parameter mutation", "parameter gradient", "input gradient"]
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """A traced forward and backward. `parameters` and `buffers` are the names that the indices of
    placeholders and results count; `constants` are the tensors that the model closed over, whose
    names stand in `buffers` too."""

    graph: fx.Graph
    placeholders: tuple[Placeholder, ...]
    results: tuple[Result, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedInput:
    """A placeholder of a recorded forward. `target` is the name that stands for a parameter, a buffer or a constant (a
    tensor that the model closed over); an input of the step has none."""

    node: fx.Node
    kind: Literal["parameter", "buffer", "constant", "input"]
    target: str = ""
    tensor: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The forward of a step, operator by operator, as every line of the model's Python called them.

    `inputs` are the placeholders of `graph`, in order. `mutated[i]` is the buffer that output i is written to, or None
    for an output of the step. `module` holds the graphs of regions (without gradients, with autocast).
    """

    graph: fx.Graph
    module: fx.GraphModule
    inputs: tuple[RecordedInput, ...]
    mutated: tuple[str | None, ...]
    device_type: str


@contextlib.contextmanager
def recorded(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], canonical: Mapping[str, str], *, lines: bool = False
) -> Iterator[Recorded]:
    """Record `module(*inputs)`, which returns a tuple of tensors. The record can be differentiated within the context.

    The module's tensors and the inputs are fakes of one mode. `canonical` maps every name of a parameter or buffer to
    the name that stands for it: tied ones are one input of the joint graph, whose gradient is the total. With `lines`,
    nodes say by which lines of code they were made.
    """
    with torch.library._scoped_library(_CALLS, "FRAGMENT") as library, _lean(lines), _plain_lstm():
        with _recorded_functions(library), _as_captured():
            exported = torch.export.export(module, inputs, strict=False)
        tensors = (*inputs, *module.parameters(), *module.buffers())
        yield _record(exported, canonical, next((t.device.type for t in tensors), "cpu"))


_NUMBERS = ("aten.item.default", "aten._local_scalar_dense.default")
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _record(exported: Any, canonical: Mapping[str, str], device_type: str) -> Recorded:
    from torch.export.graph_signature import InputKind, OutputKind

    kinds: dict[Any, Literal["parameter", "buffer", "constant"]] = {
        InputKind.PARAMETER: "parameter",
        InputKind.BUFFER: "buffer",
        InputKind.CONSTANT_TENSOR: "constant",
    }
    inputs: list[RecordedInput] = []
    graph = exported.graph_module.graph
    for part in exported.graph_module.modules():
        for node in reversed(part.graph.nodes) if isinstance(part, fx.GraphModule) else ():
            # what was read of a tensor whose values are known is a number of Python's, and nobody uses the node
            if str(node.target) in _NUMBERS and not node.users and not isinstance(node.meta.get("val"), _SYMBOLS):
                part.graph.erase_node(node)
    for node, spec in zip(graph.find_nodes(op="placeholder"), exported.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(RecordedInput(node=node, kind="input"))
        elif spec.kind in kinds:
            known = exported.state_dict.get(spec.target)
            tensor = exported.constants[spec.target] if known is None else known
            target = canonical.get(spec.target, spec.target)
            inputs.append(RecordedInput(node=node, kind=kinds[spec.kind], target=target, tensor=tensor))
        else:
            raise ValueError(f"the model holds {spec.target!r} of kind {spec.kind.name}, which has no tensor form")
    mutated: list[str | None] = []
    for output in exported.graph_signature.output_specs:
        if output.kind is OutputKind.USER_OUTPUT:
            mutated.append(None)
        elif output.kind is OutputKind.BUFFER_MUTATION:
            mutated.append(canonical.get(output.target, output.target))
        else:
            raise ValueError(
                f"the model changes {output.target!r} in place ({output.kind.name}): only buffers and parameters may be"
            )
    return Recorded(
        graph=graph,
        module=exported.graph_module,
        inputs=tuple(inputs),
        mutated=tuple(mutated),
        device_type=device_type,
    )


def joint(record: Recorded, inputs: tuple[torch.Tensor, ...], mode: FakeTensorMode) -> Joint:
    """Forward and backward of a record as one functional graph.

    Two traces, because each alone loses models: `torch.export` (not strict) records the model's own
    calls with their module paths, and AOT autograd makes the functional joint graph of that record.
    """
    lifted = _Lifted(record, mode)
    with contextlib.ExitStack() as stack:
        # forward enters the autocast context itself: backward runs outside of it, as eager's does
        stack.enter_context(without_autocast(lifted.kind))
        stack.enter_context(_without_effects())
        from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

        traced = aot_export_joint_with_descriptors(stack, lifted, inputs)
        return _with_constants(_describe(traced.graph_module.graph, lifted), traced.graph_module)


def _with_constants(described: Joint, module: fx.GraphModule) -> Joint:
    """The graph with the tensors that its own code makes of numbers (`torch.tensor(0.5)` in an autograd.Function, which
    runs only when the joint graph is traced) as inputs, equal ones as one."""
    known: dict[Any, fx.Node] = {}
    placeholders, buffers, constants = [*described.placeholders], [*described.buffers], {**described.constants}
    for node in described.graph.find_nodes(op="get_attr"):
        tensor = getattr(module, str(node.target), None)
        if not isinstance(tensor, torch.Tensor) or not is_real(tensor):
            continue
        key = (value_of(tensor) or node.target, tensor.dtype, tuple(tensor.shape), tensor.device)
        if key not in known:
            name = f"lifted_constant_{len(known)}"
            with described.graph.inserting_before(placeholders[0].node):
                known[key] = described.graph.placeholder(name)
            known[key].meta["val"] = node.meta.get("val", tensor)
            placeholders.append(Placeholder(node=known[key], kind="buffer", index=len(buffers)))
            buffers.append(name)
            constants[name] = tensor
        node.replace_all_uses_with(known[key])
    return replace(described, placeholders=tuple(placeholders), buffers=tuple(buffers), constants=constants)


@contextlib.contextmanager
def _lean(lines: bool) -> Iterator[None]:
    """Trace without what nobody reads: a stack trace for each node, and Python code of each graph on the way."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    with _use_lazy_graph_module(True), contextlib.ExitStack() as stack:
        if not lines:
            stack.enter_context(_without_stack_traces())
        yield


@contextlib.contextmanager
def _without_stack_traces() -> Iterator[None]:
    from torch.fx import config

    if not hasattr(config, "do_not_emit_stack_traces"):
        yield  # before 2.12 tracing always takes them
        return
    known = config.do_not_emit_stack_traces
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = known


def is_recorded_function(node: fx.Node) -> bool:
    """Whether a node of a record stands for the call of a `torch.autograd.Function`, whose forward and backward run
    when the record is differentiated."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == _CALLS


PLACE = "autopar_place"


def set_place(node: fx.Node, place: int) -> None:
    """Mark a node of a record; `place_of` finds the mark on the forward nodes that are traced from it."""
    node.meta["custom"] = {**node.meta.get("custom", {}), PLACE: place}


def place_of(node: fx.Node) -> int | None:
    found: int | None = (node.meta.get("custom") or {}).get(PLACE)
    return found


@contextlib.contextmanager
def as_exported() -> Iterator[None]:
    """Within it a module that runs takes the branches that it takes while it is exported."""
    from torch._export.utils import _compiling_state_context

    with _compiling_state_context(), _as_captured():
        yield


@contextlib.contextmanager
def _as_captured() -> Iterator[None]:
    """Within it parts of torch do what they do in another way, which a graph can hold."""
    with (
        _masks_as_they_are(),
        _averaged_norms(),
        _plain_checkpoints(),
        _regions_within_regions(),
        _settled_modules(),
    ):
        yield


@contextlib.contextmanager
def _regions_within_regions() -> Iterator[None]:
    """Within it `torch.export` keeps a change of grad mode that stands in a region with autocast. Its pass that makes
    regions without gradients splits a graph at such a change, enters autocast again at the head of the piece, and then
    does not find the change there, which is lost without a word."""
    from torch._export.passes import replace_set_grad_with_hop_pass as found

    passes: Any = found
    known = passes.replace_set_grad_with_hop_pass

    def replace_set_grad(module: fx.GraphModule, signature: Any) -> Any:
        _close_autocast_where_grad_changes(module.graph)
        return known(module, signature)

    passes.replace_set_grad_with_hop_pass = replace_set_grad
    try:
        yield
    finally:
        passes.replace_set_grad_with_hop_pass = known


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


@contextlib.contextmanager
def _settled_modules() -> Iterator[None]:
    """`module.to(dtype)` in forward does nothing where the module is so already (the router of Switch Transformers);
    by itself it swaps every parameter of fakes."""
    apply = nn.Module._apply

    def settled(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        with torch.no_grad():
            for name, tensor in (*self.named_parameters(recurse=recurse), *self.named_buffers(recurse=recurse)):
                made = fn(tensor)
                if made is not tensor and storage_span(made) != storage_span(tensor):
                    was, now = (f"{t.dtype} on {t.device}" for t in (tensor, made))
                    raise ValueError(
                        f"forward converts {name} of a {type(self).__name__} from {was} to {now}, which a program does "
                        f"not write: convert the module before, outside of forward"
                    )
        return self

    nn.Module._apply = settled  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]


_CALLS = "autopar_calls"
"""The namespace of operators that stand for calls of autograd functions while a model is captured."""


@contextlib.contextmanager
def _recorded_functions(library: torch.library.Library) -> Iterator[None]:
    """Export keeps calls of a `torch.autograd.Function`: by itself it records what its forward does, and loses
    the backward that the model wrote. Each call becomes an operator, whose decomposition is the call: export
    takes it as it is, and autograd runs it in the second trace. Those of `torch.library` are operators already."""
    function = torch.autograd.Function
    apply, number = vars(function)["apply"], itertools.count()

    def recorded(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(apply.__func__, cls)
        if cls.__module__ == torch._library.autograd.__name__ or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        shape: list[pytree.TreeSpec] = []

        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            filled = list(leaves)
            for i, tensor in zip(given, tensors, strict=True):
                filled[i] = tensor
            own_args, own_kwargs = pytree.tree_unflatten(filled, spec)
            made, made_spec = pytree.tree_flatten(call(*own_args, **own_kwargs))
            if not all(isinstance(leaf, torch.Tensor) for leaf in made):
                raise TypeError(f"{cls.__qualname__} returns what is no tensor: autopar captures functions of tensors")
            shape[:] = [made_spec]
            return made

        name = f"{cls.__name__}_{next(number)}"
        library.define(f"{name}(Tensor[] tensors) -> Tensor[]")  # type: ignore[no-untyped-call]
        library.impl(name, run, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
        made = getattr(getattr(torch.ops, _CALLS), name)([leaves[i] for i in given])
        return pytree.tree_unflatten(made, shape[0])

    function.apply = classmethod(recorded)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        function.apply = apply  # type: ignore[method-assign]


@contextlib.contextmanager
def _plain_checkpoints() -> Iterator[None]:
    """A checkpoint runs its function twice for memory's sake: a plan decides for itself what is kept. Where no argument
    of a reentrant one requires a gradient, the results have none, as those of the original. One that is not reentrant
    packs what is saved in hooks, which run without gradients: the record of a checkpoint in another one would keep that
    mode for all that follows."""
    import torch.utils.checkpoint
    from torch.utils.checkpoint import CheckpointFunction

    checkpoints: Any = torch.utils.checkpoint
    hooks = checkpoints._checkpoint_hook

    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        wanted = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            return function(*args)

    CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign]
    checkpoints._checkpoint_hook = lambda frame: contextlib.nullcontext()
    try:
        yield
    finally:
        del CheckpointFunction.apply
        checkpoints._checkpoint_hook = hooks


@contextlib.contextmanager
def _plain_lstm() -> Iterator[None]:
    """An LSTM is its steps, on every device and in every dtype. In float32 on a CPU torch would make one operator of a
    layer, of which no dim can be split and whose backward has results that are None."""
    from torch._decomp import decompositions

    known = decompositions.select_one_layer_lstm_function
    decompositions.select_one_layer_lstm_function = lambda *_: decompositions.one_layer_lstm
    try:
        yield
    finally:
        decompositions.select_one_layer_lstm_function = known


@contextlib.contextmanager
def _averaged_norms() -> Iterator[None]:
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

    _BatchNorm.forward = averaged  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = forward  # type: ignore[method-assign]


@contextlib.contextmanager
def _masks_as_they_are() -> Iterator[None]:
    """`nn.TransformerEncoder` compares the mask that it is given with the causal one, to give attention a hint: a
    branch on data, with and without which the result is the same."""
    from torch.nn.modules import transformer

    detect = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect


@contextlib.contextmanager
def _without_effects() -> Iterator[None]:
    """The check of a factorisation's success is no more than an assertion: where torch takes it for an effect (from
    2.13 on), a traced graph would have tokens among its inputs."""
    holder = getattr(torch._library.simple_registry.singleton.find("aten::_linalg_check_errors"), "effect", None)
    if holder is None or holder.effect is None:
        yield
        return
    known = holder.effect
    holder.register(None)
    try:
        yield
    finally:
        holder.register(known)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which ops take their operands as they are."""
    if not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What an active autocast context casts to."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


class _Lifted(nn.Module):
    """A record as a module whose parameters and buffers are numbered.

    `ExportedProgram.module()` would do, slower, and gives a tied weight one input for each name.
    """

    def __init__(self, record: Recorded, mode: FakeTensorMode) -> None:
        super().__init__()
        self.kind, self.autocast = record.device_type, autocast_dtype(record.device_type)
        # kept in a tuple, lest nn.Module register it as a submodule with names of its own
        self.body = (record,)
        names: dict[str, str] = {}
        parameters: list[str] = []
        buffers: list[str] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.order: list[str | int] = []
        count = 0
        for given in record.inputs:
            if given.kind == "input":
                self.order.append(count)
                count += 1
                continue
            assert given.tensor is not None
            if given.target not in names:
                if given.kind == "parameter":
                    names[given.target] = f"p{len(parameters)}"
                    parameters.append(given.target)
                    self.register_parameter(names[given.target], given.tensor)  # type: ignore[arg-type]
                else:
                    names[given.target] = f"b{len(buffers)}"
                    buffers.append(given.target)
                    if given.kind == "constant":
                        self.constants[given.target] = given.tensor
                    self.register_buffer(names[given.target], _as_fake(given.tensor, mode))
            self.order.append(names[given.target])
        self.names = (tuple(parameters), tuple(buffers))
        self.mutated = tuple(None if target is None else names[target] for target in record.mutated)
        self.written = self._written_parameters(mode)

    def _written_parameters(self, mode: FakeTensorMode) -> tuple[str, ...]:
        """The parameters that forward writes: a run on fakes shows it, of a graph that writes anything."""
        record = self.body[0]
        regions = [m.graph for m in record.module.modules() if m is not record.module and isinstance(m, fx.GraphModule)]
        if not any(_writes(node) for graph in (record.graph, *regions) for node in graph.nodes):
            return ()
        trial = {name: p.detach().clone() for name, p in self.named_parameters()}
        values = [
            trial[o] if o in trial else given.node.meta["val"].detach().clone()
            for o, given in zip(self.order, record.inputs, strict=True)
        ]
        before = {name: tensor._version for name, tensor in trial.items()}
        with mode, torch.no_grad():
            body = _Traced(record.module, garbage_collect_values=False, graph=record.graph)
            body.run(*values, enable_io_processing=False)
        return tuple(name for name, tensor in trial.items() if tensor._version != before[name])

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from torch.fx.traceback import preserve_node_meta

        # what is written of a parameter is a copy, which is read from then on and is a result of its own; gradients
        # reach the parameter through it. `_describe` removes the copying.
        copies = {name: getattr(self, name).clone() for name in self.written}
        values = [inputs[o] if isinstance(o, int) else copies.get(o, getattr(self, o)) for o in self.order]
        # the recorded nodes hand their module paths to what is traced from them
        cast = torch.autocast(self.kind, dtype=self.autocast, enabled=self.autocast is not None)
        with preserve_node_meta(), cast:
            body = _Traced(self.body[0].module, garbage_collect_values=False, graph=self.body[0].graph)
            results = body.run(*values, enable_io_processing=False)
        outputs = []
        for name, result in zip(self.mutated, results, strict=True):
            if name is None:
                # An output that is a view (of an input, of another output) would come back from AOT as its base.
                # `_describe` removes the clone.
                outputs.append(result.clone())
            else:
                getattr(self, name).copy_(result)
        return *outputs, *(copy.detach().clone() for copy in copies.values())


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _Traced(fx.Interpreter):
    """Runs a recorded graph. Upsampling stays one operator, with torch's own backward: its decompositions in Python
    look rows up by computed indices, which hides that they are in order."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, torch._ops.OpOverload) and target.__name__.split(".")[0] in _KEPT_WHOLE:
            with torch._C._DisablePythonDispatcher():
                return super().call_function(target, args, kwargs)
        if target is torch.ops.higher_order.cond:
            return _either(*args, **kwargs)
        if isinstance(target, torch._ops.HigherOrderOperator) and target.__name__ in _LOOPS:
            raise ValueError(
                f"the model has control flow that depends on data, torch's {target.__name__}, which one graph cannot "
                f"hold: write the loop out in Python, or as operators on all of its steps"
            )
        return super().call_function(target, args, kwargs)


_LOOPS = frozenset({"while_loop", "map", "map_impl", "scan", "associative_scan"})


class _IfTaken(torch.autograd.Function):
    """The operand of a branch. A branch that is not taken may be undefined where it stands, and then the derivative of
    nothing is NaN: it gives no gradient instead."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(taken)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (taken,) = ctx.saved_tensors
        return torch.where(taken, gradient, 0.0), None


def _either(wanted: Any, if_true: fx.GraphModule, if_false: fx.GraphModule, operands: Sequence[Any]) -> Any:
    """`torch.cond` on data: both branches run, and their results, a tensor or several, are selected from."""
    if not isinstance(wanted, torch.Tensor):
        raise ValueError(f"the predicate of torch.cond is {wanted!r}: make it a tensor of one bool")
    wanted = wanted.reshape(()).to(torch.bool)

    gate: Any = _IfTaken.apply

    def run(branch: fx.GraphModule, taken: torch.Tensor) -> tuple[list[Any], pytree.TreeSpec]:
        given = [gate(x, taken) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in operands]
        traced = _Traced(branch, garbage_collect_values=False)
        return pytree.tree_flatten(traced.run(*given, enable_io_processing=False))

    results = []
    (made, spec), (other, other_spec) = run(if_true, wanted), run(if_false, wanted.logical_not())
    if spec != other_spec:
        raise ValueError(f"the branches of torch.cond return {spec} and {other_spec}: they must be alike")
    for a, b in zip(made, other, strict=True):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            raise ValueError("a branch of torch.cond returns what is no tensor: autopar selects from tensors")
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"the branches of torch.cond return {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}: both run, "
                f"and one result is selected, so that they must be alike"
            )
        results.append(torch.where(wanted, a, b))
    return pytree.tree_unflatten(results, spec)


_KEPT_WHOLE = (
    *(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d")),
    *(f"upsample_{kind}" for kind in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
    *(f"_upsample_nearest_exact{dims}d" for dims in (1, 2, 3)),
)


def _as_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    from torch._subclasses import FakeTensor

    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _describe(graph: fx.Graph, lifted: _Lifted) -> Joint:
    from torch._functorch._aot_autograd import descriptors as d

    def position(description: Any) -> tuple[Any, int]:
        if isinstance(description, d.ParamAOTInput):
            return "parameter", int(description.target[1:])
        if isinstance(description, d.BufferAOTInput):
            return "buffer", int(description.target[1:])
        if isinstance(description, d.PlainAOTInput):
            return "input", description.idx
        if isinstance(description, d.TangentAOTInput) and isinstance(description.output, d.PlainAOTOutput):
            return "tangent", description.output.idx
        if isinstance(description, d.TangentAOTInput) and isinstance(description.output, d.InputMutationAOTOutput):
            kind, index = position(description.output.mutated_input)
            name = lifted.names[1][index] if kind == "buffer" else description.output.mutated_input.expr()
            raise ValueError(
                f"the model writes what requires a gradient into {kind} {name.removeprefix('model.')}, from where the "
                f"next step would differentiate it: write value.detach(), or write under torch.no_grad()"
            )
        raise ValueError(f"the joint graph has an input that autopar does not know: {description.expr()}")

    placeholders = []
    for node in graph.find_nodes(op="placeholder"):
        kind, index = position(node.meta["desc"])
        if kind == "parameter" and f"p{index}" in lifted.written:
            copied = next(user for user in node.users if user.target is torch.ops.aten.clone.default)
            copied.replace_all_uses_with(node)
            graph.erase_node(copied)
        placeholders.append(Placeholder(node=node, kind=kind, index=index))

    output = graph.output_node()
    results = []
    traced: Any = output.args[0]
    for node, description in zip(traced, output.meta["desc"], strict=True):
        if description is None:
            continue  # the place of a gradient that nothing asks for
        if isinstance(description, d.PlainAOTOutput):
            assert node.target is torch.ops.aten.clone.default
            written = description.idx - sum(name is None for name in lifted.mutated)
            if written < 0:
                results.append(Result(node=node.args[0], kind="output", index=description.idx))
            else:
                index = int(lifted.written[written][1:])
                results.append(Result(node=node.args[0], kind="parameter mutation", index=index))
        elif isinstance(description, d.GradAOTOutput):
            kind, index = position(description.grad_of)
            if kind in ("parameter", "input"):
                results.append(Result(node=node, kind=f"{kind} gradient", index=index))  # type: ignore[arg-type]
        elif isinstance(description, d.InputMutationAOTOutput):
            kind, index = position(description.mutated_input)
            if kind != "buffer":
                raise ValueError(
                    f"the model changes {description.mutated_input.expr()} in place: only buffers and parameters may be"
                )
            results.append(Result(node=node, kind="mutation", index=index))
        else:
            raise ValueError(f"the joint graph has an output that autopar does not know: {description.expr()}")
    parameters, buffers = lifted.names
    return Joint(
        graph=graph,
        placeholders=tuple(placeholders),
        results=tuple(results),
        parameters=parameters,
        buffers=buffers,
        constants=lifted.constants,
    )


def module_path(node: fx.Node) -> str | None:
    """Path of the innermost module whose forward made the node ("" for the outermost), or None for
    a node that autograd made."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path: str = next(reversed(stack.values()))[0]
    return path


def is_accumulation(node: fx.Node) -> bool:
    """Whether it is an add that autograd made to sum the gradients of a tensor's consumers. Such a
    node carries the sequence number of the last forward node, whose gradient it is not."""
    return bool(node.meta.get("is_gradient_acc"))


def is_backward(node: fx.Node) -> bool:
    """Whether the node was traced while autograd ran."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


# ---------------------------------------------------------------------------------------------- distributed


def all_gather_single(output: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start gathering `x` along dim 0 into `output`. Until 2.12 the function has another name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(output, x, group=group, async_op=True)
    return work


def reduce_scatter_single(
    output: torch.Tensor, x: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> dist.Work | None:
    """Start reducing `x` and scattering it along dim 0 into `output`. Until 2.12 the function has another name."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = scatter(output, x, op=op, group=group, async_op=True)
    return work


def local_tensor(dtensor: DTensor) -> torch.Tensor:
    """What this rank holds of it, without the autograd node that `to_local()` makes."""
    return dtensor._local_tensor


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """The DTensor of global `shape` and `stride` of which this rank holds `local`. Nothing is
    communicated and nothing is checked. It requires gradients if `local` does."""
    from torch.distributed.tensor import DTensor

    spec = _spec(mesh, tuple(placements), torch.Size(shape), tuple(stride), local.dtype)
    return DTensor(local.detach(), spec, requires_grad=local.requires_grad)  # type: ignore[no-untyped-call]


@cache
def _spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def strided_shard(dim: int, split_factor: int) -> Placement:
    """A split of `dim` in `split_factor` contiguous pieces, each of them sharded over the mesh axis.

    Seen on torch 2.12 and 2.13 with gloo, for a dim that no other axis splits by `_StridedShard`: `from_local`,
    `distribute_tensor`, `full_tensor` and `redistribute` to and from Shard and Replicate are right, beside a
    Shard of the same or another dim too; with one on each of two axes of the same dim it is not. AdamW and
    clipping by norm are right.

    On torch 2.11 one alone on its dim cannot be redistributed or gathered at all: it raises ValueError.

    Distributed checkpoints are NOT right: saving one alone on its dim raises ("overlapping chunks"), and
    loading into one gives wrong values silently, since a checkpoint takes the local tensor for one
    contiguous chunk. Redistribute to Shard before saving, and load into a Shard.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


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
