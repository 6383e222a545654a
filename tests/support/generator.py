"""A generator of programs: what people write in a model and around it, drawn as statements and printed as source.

    program = drawn(17)          # draws statements of the tables in `generator_ops` and `generator_python`
    print(program.source)        # a module that can be read, pasted and run
    shrunk(program, fails)       # with fewer statements, as long as it fails

A program is a tree of nodes, each a kind and a seed. It is built by running it, statement by statement: what fails for
the value that comes in is left out, so that any tree is a program, and what is left of it when nodes are removed too.

The source defines `make()` (the model), `batch(step)` (what it is called with), and, where the program is about them,
`loss_fn` (given to autopar), `loss_of` (the loss of an output), `optimizer(model)` and `train(model, optimizer, step)`.
"""

from __future__ import annotations

import collections
import itertools
import linecache
import random
import re
import sys
import time
import types
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

import numpy as np
import torch
from generator_kinds import LOOP, SECTIONS, Kind, Table, filled, sections
from generator_ops import END, OPERATORS, START
from generator_python import PYTHON
from torch import nn
from torch.utils._pytree import tree_leaves

from autopar.compat.dispatch import Watching
from autopar.ops.rules import RULES
from autopar.testing.steps import StepResult, errors

KINDS: dict[str, Kind] = {**OPERATORS, **PYTHON}

LARGEST = 1200
"""Elements of a value; a statement that makes more is left out."""

STEPS = 3

IMPORTS = (
    *(
        (name, f"import {name}")
        for name in (
            "argparse", "array", "collections", "contextlib", "contextvars", "copy", "ctypes", "dataclasses", "enum",
            "functools", "itertools", "math", "os", "queue", "random", "threading", "types", "weakref",
        )
    ),
    ("np", "import numpy as np"),
    ("torch", "import torch"),
    ("F", "import torch.nn.functional as F"),
    ("nn.utils.prune", "import torch.nn.utils.prune"),
    ("torch.utils.checkpoint", "import torch.utils.checkpoint"),
    ("nn", "from torch import nn"),
)  # fmt: skip
"""What a source imports if it says the name."""


# ----------------------------------------------------------------------------------------------------- what is drawn


@dataclass(frozen=True)
class Node:
    """A statement: its kind, what is drawn in its text, and the statements within it."""

    kind: str
    seed: int
    body: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Tree:
    start: Node
    nodes: tuple[Node, ...]
    end: Node


@dataclass(frozen=True)
class Program:
    """A program, the kinds of the statements that it holds, and the tree that it was built of (None: it was read)."""

    source: str
    kinds: frozenset[str] = frozenset()
    tree: Tree | None = None

    @cached_property
    def is_plain(self) -> bool:
        """Whether it trains as every program does: nothing but the step changes the model."""
        return re.search(r"^def train\(", self.source, re.M) is None

    @cached_property
    def _code(self) -> types.CodeType:
        name = f"program_{zlib.crc32(self.source.encode()):08x}.py"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        return compile(self.source, name, "exec")

    def load(self) -> Any:
        """Run the source, in a module of its own: two of them share no state."""
        module = _module({})
        exec(self._code, vars(module))
        return module


_loaded: collections.deque[str] = collections.deque()


def _module(names: Mapping[str, Any]) -> types.ModuleType:
    """A module that holds names. It is found by its own, as dataclasses and torch.cond look for it, for some time."""
    module = types.ModuleType(f"program_{next(_numbers)}")
    vars(module).update((name, value) for name, value in names.items() if not name.startswith("__"))
    sys.modules[module.__name__] = module
    _loaded.append(module.__name__)
    if len(_loaded) > 100:
        del sys.modules[_loaded.popleft()]
    return module


_numbers = itertools.count()

NESTING = 2
"""How deep statements stand in statements."""


class Drawing:
    """Draws nodes, from some of the kinds, and at most so many in a row."""

    def __init__(self, seed: object, only: Collection[str] = (), most: int = 6) -> None:
        self.random, self.most = Random(str(seed)), most
        self.kinds = [kind for name, kind in KINDS.items() if not only or name in only]

    def node(self, kind: Kind | None = None, depth: int = 0, within: str = "") -> Node:
        if kind is None:
            kinds = [k for k in self.kinds if k.where != "layer" or within == "layers"]
            kind = self.random.choices(kinds, [k.weight for k in kinds])[0]
        body: tuple[Node, ...] = ()
        if kind.has_body and depth < NESTING:
            within = "layers" if kind.name == "layers" else within
            count = self.random.randint(1, (self.most + 1) // 2)
            body = tuple(self.node(depth=depth + 1, within=within) for _ in range(count))
        return Node(kind.name, self.random.randrange(10**6), body)

    def end(self, table: Table) -> Node:
        kinds = list(table.values())
        return Node(self.random.choices(kinds, [k.weight for k in kinds])[0].name, self.random.randrange(10**6))

    def tree(self, must: str | None = None) -> Tree:
        nodes = [self.node() for _ in range(self.random.randint(1, self.most))]
        if must in KINDS:
            kind = KINDS[must]
            place = self.random.randint(0, len(nodes))
            if kind.where == "layer":
                layer = Node(must, self.random.randrange(10**6), (self.node(OPERATORS["mlp"]),))
                nodes.insert(place, Node("layers", self.random.randrange(10**6), (self.node(OPERATORS["mlp"]), layer)))
            else:
                nodes.insert(place, self.node(kind))
        start, end = (
            Node(must, self.random.randrange(10**6)) if must in table else self.end(table) for table in (START, END)
        )
        if any(KINDS[node.kind].loops for node in _all(nodes)):
            end = Node("square", end.seed)  # the loop calls backward on what the model returns
        return Tree(start, tuple(nodes), end)


def _all(nodes: Sequence[Node]) -> Iterator[Node]:
    """Nodes, and those within them."""
    for node in nodes:
        yield node
        yield from _all(node.body)


# ----------------------------------------------------------------------------------------------- how it becomes source


@dataclass
class Added:
    """What statements add to a source."""

    lines: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in SECTIONS})
    kinds: set[str] = field(default_factory=set)

    def add(self, other: Added) -> None:
        for name, lines in other.lines.items():
            self.lines[name] += lines
        self.kinds |= other.kinds


@dataclass
class Scope:
    """Where statements run while they are built: names, those among them that later statements may read, and whose
    `self` it is."""

    names: dict[str, Any]
    values: list[str]
    owner: str = "model"
    keeps: bool = False
    """Whether the shape must stay."""
    is_transformed: bool = False
    """Whether a transform of `torch.func` runs it: a parameter whose data were set there ends eager PyTorch itself."""

    def run(self, lines: Sequence[str]) -> None:
        exec("\n".join(lines), self.names)


class Unfit(Exception):
    """A statement is nothing for the value that comes in."""


def built(tree: Tree) -> Program:
    """The program of a tree. Raises Unfit where no source can be made of it."""
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        torch._dynamo.reset()  # torch.cond compiles
        return _Builder().program(tree)


def _own_module() -> nn.Module:
    """A module of a class of its own, which statements may write."""
    own: nn.Module = type("Model", (nn.Module,), {})()
    return own


class _Builder:
    def __init__(self) -> None:
        self.numbers = itertools.count(1)

    def program(self, tree: Tree) -> Program:
        names = vars(_module({}))
        exec("\n".join(line for _, line in IMPORTS), names)
        names["self"] = names["model"] = _own_module()
        names["g"] = torch.Generator().manual_seed(0)
        scope = Scope(names, [])
        added = self._statement(tree.start, START[tree.start.kind], "x", scope)
        more, last = self._block(tree.nodes, scope.values[-1], scope)
        added.add(more)
        if not names[last].requires_grad:  # so that there is something to train
            more = self._statement(
                Node("sum with an earlier value", 0), KINDS["sum with an earlier value"], last, scope
            )
            added.add(more)
        draw = Random(tree.end.seed)
        ending = draw.choice(END[tree.end.kind].texts)
        parts = sections(filled(ending, self._fields(last, scope, tree.end), draw))
        scope.run(parts["batch"])
        scope.run([*parts["init"], "self.double()"])
        added.add(Added(parts, {tree.end.kind}))
        return Program(_source(added.lines), frozenset(added.kinds), tree)

    def _block(self, nodes: Sequence[Node], x: str, scope: Scope) -> tuple[Added, str]:
        """Statements one after the other, and the value that they end with."""
        added = Added()
        for node in nodes:
            kind = KINDS[node.kind]
            if kind.where not in ("any", scope.owner) or not kind.when(scope.names[x]):
                continue
            try:
                added.add(self._statement(node, kind, x, scope))
            except Exception:  # nothing for this value, whatever the reason
                continue
            x = scope.values[-1]
        return added, x

    def _fields(self, x: str, scope: Scope, node: Node) -> dict[str, str]:
        draw, n = Random(node.seed + 1), next(self.numbers)
        fields = {"x": x, "y": f"h{n}", "n": str(n)}
        value = scope.names.get(x)
        if not isinstance(value, torch.Tensor):  # the input of the model, which the statement makes
            return fields
        same = [name for name in scope.values if scope.names[name].shape == value.shape]
        shape = tuple(value.shape)
        return fields | {
            "z": draw.choice(same or [x]), "w": str(shape[-1]), "l": str(shape[-2]), "r": str(shape[0]),
            "s": str(shape), "dim": str(draw.randrange(-1, len(shape))),
        }  # fmt: skip

    def _statement(self, node: Node, kind: Kind, x: str, scope: Scope) -> Added:
        """A statement of x: the last of the scope's values is what it makes. Raises anything where it is unfit."""
        draw = Random(node.seed)
        text = draw.choice(kind.texts)
        fields = self._fields(x, scope, node)
        text = filled(text, fields, draw)
        if "{body:" not in text:
            return self._run(text, fields["y"], x, scope, Added(kinds={kind.name}))
        for count in range(len(node.body), -1, -1):
            try:
                whole, inner = self._with_body(text, node.body[:count], x, scope)
                inner.kinds.add(kind.name)
                return self._run(whole, fields["y"], x, scope, inner)
            except Exception:
                if not count:
                    raise
        raise AssertionError

    def _with_body(self, text: str, body: Sequence[Node], x: str, scope: Scope) -> tuple[str, Added]:
        """The text with its body, and what that adds elsewhere."""
        match = re.search(r"\{body:(\w+)\}", text)
        assert match is not None
        own_class = "{init}" in text
        names = vars(_module(scope.names))
        value = names[x].detach().clone().requires_grad_(names[x].requires_grad)
        names[match[1]] = value * 1 if value.requires_grad else value  # as most values, no leaf
        if own_class:
            names["self"] = _own_module()
            names["self"].number = 0
        owner = ("layer" if "number" in text else "block") if own_class else scope.owner
        is_transformed = scope.is_transformed or "torch.func." in text or "torch.vmap" in text
        values = [match[1]] if own_class else [*scope.values, match[1]]
        inner = Scope(names, values, owner, keeps=True, is_transformed=is_transformed)
        added, last = self._block(body, match[1], inner)
        lines, added.lines["forward"] = added.lines["forward"] or ["pass"], []
        text = _indented(text, match[0], lines)
        if own_class:
            text = _indented(text, "{init}", added.lines["init"] or ["pass"])
            added.lines["init"] = []
        return text.replace("{b}", last), added

    def _run(self, text: str, y: str, x: str, scope: Scope, added: Added) -> Added:
        """Run the text where the body has run by itself, and check what it makes."""
        parts = sections(text)
        for name in ("top", "batch"):
            scope.run([*added.lines[name], *parts[name]])
        if x == "x":  # the beginning, where the sizes are known now
            shape = scope.names["x"].shape
            known = {"x.w": str(shape[-1]), "x.c": str(shape[1])}
            parts = {name: [filled(line, known, Random(0)) for line in lines] for name, lines in parts.items()}
        scope.run([*parts["init"], "self.double()"])
        scope.run(parts["make"])
        before = scope.names[x].shape
        if scope.is_transformed and any(".data = " in line for line in parts["forward"]):
            raise Unfit
        scope.run(parts["forward"])
        made = scope.names[y]
        if not isinstance(made, torch.Tensor) or made.dtype != torch.float64 or made.dim() < 2:
            raise Unfit
        if not 0 < made.numel() <= LARGEST or not made.isfinite().all() or (scope.keeps and made.shape != before):
            raise Unfit
        scope.values.append(y)
        added.add(Added(parts))
        return added


def _indented(text: str, mark: str, lines: Sequence[str]) -> str:
    """The text with lines in the place of one that holds nothing but a mark."""
    match = re.search(rf"^( *){re.escape(mark)}$", text, re.M)
    assert match is not None, f"{mark} does not stand on a line of its own in {text}"
    return text[: match.start()] + "\n".join(match[1] + line for line in lines) + text[match.end() :]


def _source(lines: dict[str, list[str]]) -> str:
    """A module of the lines of all sections."""

    def block(name: str, indent: int = 4) -> list[str]:
        return [" " * indent + line for line in lines[name] if line.strip()]

    inputs = [match[1] for line in lines["batch"] if (match := re.match(r"(\w+) =", line))]
    top: list[str] = []
    for definition in _definitions(lines["top"]):
        if definition not in top:
            top.append(definition)
    out = [*(definition + "\n\n" for definition in top)]
    out += ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()", *block("init", 8), ""]
    out += [f"    def forward(self, {', '.join(inputs)}):", *block("forward", 8), "", ""]
    out += ["def make():", "    torch.manual_seed(0)"]
    making = [line for line in block("make") if line.strip() != "pass"]
    out += ["    model = Model().double()", *making, "    return model"] if making else ["    return Model().double()"]
    out += ["", "", "def batch(step):", "    g = torch.Generator().manual_seed(step)", *block("batch")]
    out += [f"    return dict({', '.join(f'{name}={name}' for name in inputs)})", ""]
    if any(lines[name] for name in LOOP):
        loss = block("loss") or ["    loss = model(**batch(step))"]
        out += ["", "def train(model, optimizer, step):", *block("before"), *loss]
        out += ["    loss.backward()", *block("backward"), "    yield loss  # now there are gradients"]
        out += ["    optimizer.step()", "    optimizer.zero_grad()", *block("after"), ""]
    body = "\n".join(out)
    needed = [line for name, line in IMPORTS if re.search(rf"(?<![\w.]){re.escape(name)}\.", body)]
    return "\n".join((*needed, "", "", body))


def _definitions(lines: Sequence[str]) -> Iterator[str]:
    """Classes, functions and assignments of lines of a source."""
    current: list[str] = []
    for line in lines:
        begins = line[:1] not in ("", " ", ")") and not (current and current[-1].startswith("@"))
        if begins and current:
            yield "\n".join(current).rstrip()
            current = []
        if line.strip() or current:
            current.append(line)
    if current:
        yield "\n".join(current).rstrip()


# ----------------------------------------------------------------------------------------- eager, and what is valid


@dataclass(frozen=True)
class Step:
    """What a step leaves: the loss, gradients by name (no entry: None), and parameters and buffers after it."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def loss_of(program: Any, output: Any) -> torch.Tensor:
    """What a loaded program differentiates of what its model returns."""
    if hasattr(program, "loss_fn"):
        return program.loss_fn(output)
    if hasattr(program, "loss_of"):
        return program.loss_of(output)
    return output if isinstance(output, torch.Tensor) else output.loss


def train(program: Any, model: nn.Module, optimizer: Any, step: int) -> Iterator[torch.Tensor]:
    """The step of a program that has none of its own."""
    output = model(**program.batch(step))
    applied = hasattr(program, "loss_fn") and getattr(model, "applies_loss_fn", False)
    loss = output if applied else loss_of(program, output)
    loss.backward()
    yield loss
    optimizer.step()
    optimizer.zero_grad()


def steps(
    program: Any, model: nn.Module, taken: Callable[[torch.Tensor], torch.Tensor], count: int = STEPS
) -> Iterator[Step]:
    """Train a model of a loaded program, step by step. `taken` makes a plain copy of a tensor of the model's."""
    optimizer = getattr(program, "optimizer", lambda m: torch.optim.SGD(m.parameters(), lr=0.05))(model)
    for number in range(count):
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)
        own = hasattr(program, "train")
        stepping = program.train(model, optimizer, number) if own else train(program, model, optimizer, number)
        loss = taken(next(stepping))
        gradients = {k: taken(p.grad) for k, p in model.named_parameters() if p.grad is not None}
        for _ in stepping:
            pass
        parameters = {k: taken(p) for k, p in model.named_parameters()}
        yield Step(loss, gradients, parameters, {k: taken(b) for k, b in model.named_buffers()})


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_dense() if tensor.is_sparse else tensor).detach().clone()


def eager(program: Program, change: float = 0.0) -> list[Step]:
    """Three steps in PyTorch, of parameters that are a little larger."""
    with torch.random.fork_rng():
        loaded = program.load()
        model = loaded.make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + change)
        return list(steps(loaded, model, plain))


def outputs(program: Program) -> list[torch.Tensor]:
    """The tensors that the first call returns, in PyTorch."""
    with torch.random.fork_rng():
        loaded = program.load()
        model = loaded.make()
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        output = model(**loaded.batch(0))
    leaves = tree_leaves(vars(output) if is_dataclass(output) else output)
    return [plain(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]


DIVERGED = 100.0
"""Of parameters, at which steps are too large for the program."""


ROUNDING, STRIDES = "rounding decides", "a kernel misreads strides"
"""Why a program is invalid that runs: the latter where PyTorch's own kernels are wrong."""


ROUNDINGS = 8
"""How often products are rounded otherwise: each decides a comparison of equals anew, one way or the other."""


def why_invalid(program: Program) -> str:
    """Why a program tells nothing: it does not run in eager, or rounding or memory layouts decide what it computes."""
    try:
        one, other = eager(program), eager(program, 1e-13)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for a, b in zip(one, other, strict=True):
        values = [a.loss, *a.gradients.values(), *a.parameters.values(), *a.buffers.values()]
        if not all(value.isfinite().all() for value in values):
            return "something is not finite"
        if any(p.numel() and p.abs().max() > DIVERGED for p in a.parameters.values()):
            return "it diverges"
        if not max(errors(as_result(a), as_result(b)).values()) <= 1e-10:
            return ROUNDING
    if not program.is_plain and draws(program):
        return "it draws, and has a loop of its own"
    with _LaidOut():
        other = eager(program)
    if not all(max(errors(as_result(a), as_result(b)).values()) <= 1e-10 for a, b in zip(one, other, strict=True)):
        return STRIDES
    wanted = outputs(program)
    for seed in range(ROUNDINGS):
        with _Rounded(seed):
            found = outputs(program)
        if not all(map(_close, found, wanted)):
            return ROUNDING
    return ""


def as_result(step: Step) -> StepResult:
    return StepResult(
        outputs={"loss": step.loss}, gradients=step.gradients, buffers=step.buffers, parameters=step.parameters,
        loss="loss",
    )  # fmt: skip


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two values are the same but for rounding, beside the largest of them: what is all rounding is not."""
    largest = other.detach().abs().nan_to_num().max().item() if other.numel() else 0.0
    return torch.allclose(one, other, 1e-10, 1e-10 * largest, equal_nan=True)


class _Rounded(Watching):  # type: ignore[no-untyped-call]
    """Rounds what sums come to in another way, each element in its own: what was equal no longer is."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) not in SUMS or not result.is_floating_point() or result.is_sparse:
            return result
        noise = torch.rand(result.shape, dtype=torch.float64, generator=self.generator)
        return result * (1 + 1e-13 * noise).to(result.dtype)


SUMS = (
    "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default", "aten.dot.default",
    "aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim",
)  # fmt: skip


class _LaidOut(Watching):  # type: ignore[no-untyped-call]
    """Gives kernels their operands in the memory layouts that they need: some misread others, in eager as well."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        entry = RULES.get(str(func))
        needed = entry.strides if entry is not None else {}
        arguments = [argument.name for argument in func._schema.arguments] if needed else []
        laid_out = [needed[n](a) if n in needed and a is not None else a for n, a in zip(arguments, args, strict=False)]
        return func(*laid_out, *args[len(laid_out) :], **(kwargs or {}))


class _Drawn(Watching):  # type: ignore[no-untyped-call]
    """Whether random operators run, but for those with a generator of their own, as `batch` has."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.found |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and not kwargs.get("generator")
        return func(*args, **kwargs)


def draws(program: Program) -> bool:
    """Whether the model draws random numbers."""
    loaded = program.load()
    model = loaded.make()
    with torch.random.fork_rng(), _Drawn() as seen:
        list(steps(loaded, model, plain, 1))
    return seen.found


TRIES = 20
"""Trees that are drawn before a seed is given up."""


def drawn(seed: int, must: str | None = None, only: Collection[str] = (), most: int = 6) -> Program:
    """A valid program of a seed, with a statement of the kind `must`, and at most so many others, of some kinds."""
    why: list[str] = []
    for number in range(TRIES):
        drawing = Drawing((seed, number, must), only, most)
        try:
            program = built(drawing.tree(must))
        except Exception as error:
            why.append(f"{type(error).__name__}: {error}")
            continue
        if must is not None and must not in program.kinds:
            why.append(f"{must} was left out")
            continue
        reason = why_invalid(program)
        if not reason:
            return program
        why.append(reason)
        assert program.tree is not None
        for tree in _without_one(program.tree):
            try:
                smaller = built(tree)
            except Exception:
                continue
            if (must is None or must in smaller.kinds) and not why_invalid(smaller):
                return smaller
    raise Unfit(f"seed {seed}, {must}: no valid program in {TRIES} tries: {why}")


# --------------------------------------------------------------------------------------------------------- shrinking


def _without_one(tree: Tree) -> Iterator[Tree]:
    """The tree without one of its statements, or with what stands within one in its place."""
    for nodes in _smaller(tree.nodes):
        yield replace(tree, nodes=nodes)


def _smaller(nodes: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    if len(nodes) > 2:
        yield nodes[: len(nodes) // 2]
        yield nodes[len(nodes) // 2 :]
    for k in reversed(range(len(nodes))):
        before, after = nodes[:k], nodes[k + 1 :]
        yield before + after
        if nodes[k].body:
            yield before + nodes[k].body + after
            for body in _smaller(nodes[k].body):
                yield (*before, replace(nodes[k], body=body), *after)


def without(tree: Tree, kinds: frozenset[str]) -> Tree:
    """The tree without statements of these kinds, at any depth."""

    def left(nodes: Sequence[Node]) -> tuple[Node, ...]:
        return tuple(replace(node, body=left(node.body)) for node in nodes if node.kind not in kinds)

    start = Node("rows", 0) if tree.start.kind in kinds else tree.start
    end = Node("square", 0) if tree.end.kind in kinds else tree.end
    return Tree(start, left(tree.nodes), end)


def _plainer(tree: Tree) -> Iterator[Tree]:
    """The tree with a simple start, or with a simple end."""
    if tree.start.kind != "rows":
        yield replace(tree, start=Node("rows", 9))
    if tree.end.kind != "square":
        yield replace(tree, end=Node("square", 1))


def shrunk(program: Program, fails: Callable[[Program], bool], seconds: float = 60.0) -> Program:
    """A program with fewer statements that fails too. Ends after so much processor time."""
    until = time.process_time() + seconds
    tried = {program.source}
    progress = True
    while progress and time.process_time() < until:
        progress = False
        assert program.tree is not None
        for tree in (*_without_one(program.tree), *_plainer(program.tree)):
            if time.process_time() > until:
                break
            try:
                smaller = built(tree)
            except Exception:
                continue
            if smaller.source in tried:
                continue
            tried.add(smaller.source)
            if not why_invalid(smaller) and fails(smaller):
                program, progress = smaller, True
                break
    return program
