"""Graphs and programs as text that parses back: `parsed_program(text_of(program)) == program`.

    mesh dp=2
    x = input args.0: float32[8, 4] S(0%8)
    w = parameter w: float32[4, 4] R

    forward
    # layers.0
    y = aten.mm.default(x, w): float32[4, 4] {serves='mm'}
    saved x

    backward
    dw = aten.mm.default(x, x): float32[4, 4]

    output output = y: float32[8, 4] S(0%8)
    gradient w = dw: float32[4, 4] R

A graph has neither a mesh nor layouts. The metas of inputs and outputs are global, those behind an instruction are
local. A comment names the module of what follows it. A text written by hand may leave out the metas of instructions,
which are inferred, and what is saved, which is what backward reads of forward.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from .emitter import Emitter
from .graph import GraphInput, GraphOutput, JointGraph, Node, Ref, TensorMeta, overload
from .layout import PARTIAL, REPLICATE, Layout, Partial, Placement, Routed, Split, describe, local_meta
from .program import COLLECTIVES, Program, ProgramInput, ProgramOutput, RankIndex, source_line
from .rewrite import needed

META = r"\w+\[[\d, ]*\]"
INSTRUCTION = re.compile(rf"([\w, ]+) = ([\w.]+)\((.*?)\)(?:: ({META}(?:, {META})*))?(?: {{(.*)}})?")
INPUT = re.compile(rf"(\w+) = (parameter|buffer|input|tangent|seed) (.*): ({META})(?: ([^{{}}]+))?(?: {{(.*)}})?")
OUTPUT = re.compile(rf"(output|mutation|gradient|update) (.*) = (\w+)(?:: (?:({META}) ?)?([^{{}}]*))?")
ATTRIBUTES = {f.name: f.default for f in fields(Node) if f.name in ("serves", "sequence", "region")}
NUMBERS = {"inf": float("inf"), "nan": float("nan")}


# ---- printing --------------------------------------------------------------------------------------


def text_of(graph: JointGraph | Program) -> str:
    """A graph or a program as text. Raises ValueError for a value with the name of a number."""
    axes, mesh = (graph.axes, graph.mesh) if isinstance(graph, Program) else ((), ())
    if clash := graph.metas.keys() & {*NUMBERS, *(f"{axis}_rank" for axis in axes)}:
        raise ValueError(f"the value {min(clash)} cannot be told from a number of that name: rename the input")
    lines = [f"mesh {', '.join(f'{a}={n}' for a, n in zip(axes, mesh, strict=True))}"] if axes else []
    for i in graph.inputs:
        placed = f"{i.meta} {describe(i.layout)}" if isinstance(i, ProgramInput) else f"{graph.metas[i.name]}"
        rest = "" if isinstance(i, ProgramInput) or i.at_rest is None else f" {{at_rest={i.at_rest}}}"
        lines.append(f"{i.name} = {i.role} {i.target}: {placed}{rest}")
    forward, backward = graph.halves
    lines += ["", "forward", *_instructions(forward, graph, axes)]
    if isinstance(graph, Program):
        lines.append(f"saved {', '.join(graph.saved)}".rstrip())
    lines += ["", "backward", *_instructions(backward, graph, axes), ""]
    for o in graph.outputs:
        placed = f": {o.meta or ''} {describe(o.layout)}".replace("  ", " ") if isinstance(o, ProgramOutput) else ""
        lines.append(f"{o.role} {o.target} = {o.name}{placed}")
    if isinstance(graph, Program) and graph.uneven:
        lines.append(f"uneven {', '.join(sorted(graph.uneven))}")
    return "\n".join(lines) + "\n"


def _instructions(nodes: Iterable[Node], graph: JointGraph | Program, axes: tuple[str, ...]) -> Iterator[str]:
    module = ""
    for node in nodes:
        if node.module != module:
            module = node.module
            yield f"# {module}".rstrip()
        metas = ", ".join(str(graph.metas[name]) for name in node.outputs if name)
        about = [f"{k}={getattr(node, k)!r}" for k, default in ATTRIBUTES.items() if getattr(node, k) != default]
        yield f"{source_line(node, axes)}: {metas}" + (f" {{{', '.join(about)}}}" if about else "")


# ---- parsing ---------------------------------------------------------------------------------------


def parsed_program(text: str) -> Program:
    """The program of a text. Raises ValueError with the line that says something else."""
    return _Reader(text).program()


def parsed_graph(text: str) -> JointGraph:
    """The graph of a text. Raises ValueError with the line that says something else."""
    return _Reader(text).graph()


class _Reader:
    """Reads a text line by line."""

    def __init__(self, text: str) -> None:
        self.mesh: dict[str, int] = {}
        self.inputs: list[tuple[str, Any, str, TensorMeta, Layout, dict[str, Any]]] = []
        self.outputs: list[tuple[Any, str, str | None, TensorMeta | None, Layout]] = []
        self.halves: dict[str, list[Node]] = {"forward": [], "backward": []}
        self.saved: tuple[str, ...] | None = None
        self.uneven: frozenset[str] = frozenset()
        self.emitter = Emitter(metas={})
        self.half, self.module = "", ""
        for number, line in enumerate(map(str.strip, text.splitlines()), 1):
            try:
                if line:
                    self._line(line)
            except (
                ValueError,
                SyntaxError,
                RuntimeError,
                TypeError,
                LookupError,
                AttributeError,
                ArithmeticError,
            ) as error:
                said = str(error).partition("\n")[0]
                raise ValueError(f"line {number} of the program, `{line}`: {said}") from None

    def program(self) -> Program:
        if not self.mesh:
            raise ValueError("the program has no mesh: begin with a line such as `mesh dp=2, tp=4`")
        outputs = tuple(
            ProgramOutput(name=name, role=role, target=target, meta=meta, layout=layout)
            for role, target, name, meta, layout in self.outputs
        )
        tangents = {name for name, role, *_ in self.inputs if role == "tangent"}
        late = needed(self.halves["backward"], [o.name for o in outputs if o.backward])
        return Program(
            axes=tuple(self.mesh),
            mesh=tuple(self.mesh.values()),
            inputs=tuple(
                ProgramInput(name=name, role=role, target=target, meta=meta, layout=layout)
                for name, role, target, meta, layout, _ in self.inputs
            ),
            forward=tuple(self.halves["forward"]),
            backward=tuple(self.halves["backward"]),
            saved=tuple(name for name in late if name not in tangents) if self.saved is None else self.saved,
            outputs=outputs,
            metas=self.emitter.metas,
            uneven=self.uneven,
        )

    def graph(self) -> JointGraph:
        if self.mesh:
            raise ValueError("this is a program, which has a mesh: give a graph")
        return JointGraph(
            inputs=tuple(
                GraphInput(name=name, role=role, target=target, **more)
                for name, role, target, _, _, more in self.inputs
            ),
            nodes=(*self.halves["forward"], *self.halves["backward"]),
            outputs=tuple(
                GraphOutput(name=name, role=role, target=target) for role, target, name, _, _ in self.outputs
            ),
            metas=self.emitter.metas,
        )

    def _line(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if line in self.halves:
            self.half, self.module = line, ""
            self.emitter.written = self.halves[line]
        elif line.startswith("#"):
            self.module = line[1:].strip()
        elif match := INSTRUCTION.fullmatch(line):
            self._instruction(*match.groups())
        elif match := INPUT.fullmatch(line):
            name, role, target, meta, layout, more = match.groups()
            self.inputs.append((name, role, target, _meta(meta), self._layout(layout or ""), self._keywords(more)))
            self.emitter.metas[self._new(name)] = local_meta(_meta(meta), self.inputs[-1][4], self.emitter.mesh)
        elif match := OUTPUT.fullmatch(line):
            role, target, name, meta, layout = match.groups()
            made = None if name == "None" else self._names(name)[0]
            self.outputs.append((role, target, made, _meta(meta) if meta else None, self._layout(layout or "")))
        elif word == "mesh":
            self.mesh = {axis: int(size) for axis, size in (item.split("=") for item in rest.split(", "))}
            self.emitter.mesh = tuple(self.mesh.values())
        elif word == "saved":
            self.saved = self._names(rest)
        elif word == "uneven":
            self.uneven = frozenset(self._names(rest))
        else:
            raise ValueError("no mesh, input, instruction or output is written so (see autopar.ir.text)")

    def _instruction(self, outputs: str, op: str, arguments: str, metas: str | None, about: str | None) -> None:
        names = tuple("" if name == "_" else self._new(name) for name in outputs.split(", "))
        axis: tuple[int, ...] = ()
        kind = op.removeprefix("collective.")
        if not self.half:
            raise ValueError("it stands neither in forward nor in backward: write that word on a line before it")
        if kind == op:
            overload(op)
        elif kind in COLLECTIVES:
            arguments, _, name = arguments.rpartition(", ")
            if name not in self.mesh:
                raise ValueError(f"a collective ends with a mesh axis, one of {', '.join(self.mesh) or 'a mesh line'}")
            axis = ([*self.mesh].index(name),)
        elif kind != "wait":
            raise ValueError(f"there is no collective {kind}: there are {', '.join(COLLECTIVES)}")
        call = self._call(arguments)
        stated, named = re.findall(META, metas or ""), sum(map(bool, names))
        if metas and len(stated) != named:
            raise ValueError(f"it has {len(stated)} metas, and {named} of its results has a name")
        each = map(_meta, stated)
        self.emitter.emit(
            op,
            (*map(self._value, call.args), *axis),
            *names,
            kwargs=tuple((str(k.arg), self._value(k.value)) for k in call.keywords),
            metas=tuple(next(each) if name else None for name in names) if metas else None,
            module=self.module,
            backward=self.half == "backward" and not self.mesh,
            **self._keywords(about),
        )

    def _new(self, name: str) -> str:
        if name in self.emitter.metas:
            raise ValueError(f"there is a value {name} already")
        return name

    def _names(self, text: str) -> tuple[str, ...]:
        names = tuple(text.split(", ")) if text else ()
        if missing := [name for name in names if name not in self.emitter.metas]:
            raise ValueError(f"there is no value {missing[0]} before it")
        return names

    def _layout(self, text: str) -> Layout:
        layout = tuple(map(_placement, text.split()))
        if len(layout) != len(self.mesh):
            raise ValueError(f"it has {len(layout)} placements, and the mesh {len(self.mesh)} axes: write one for each")
        return layout

    def _call(self, arguments: str | None) -> ast.Call:
        call = ast.parse(f"f({arguments or ''})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError(f"({arguments}) are no arguments of one operator")
        return call

    def _keywords(self, text: str | None) -> dict[str, Any]:
        return {str(keyword.arg): self._value(keyword.value) for keyword in self._call(text).keywords}

    def _value(self, tree: ast.expr) -> Any:
        match tree:
            case ast.Constant(value=value):
                return value
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return tuple(map(self._value, items))
            case ast.Name(id=name) if name in self.emitter.metas:
                return Ref(name)
            case ast.Name(id=name) if name in NUMBERS:
                return NUMBERS[name]
            case ast.Name(id=name) if (axis := name.removesuffix("_rank")) in self.mesh and axis != name:
                return RankIndex((([*self.mesh].index(axis), 1),))
            case ast.Name(id=name):
                raise ValueError(f"there is no value {name} before it")
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.BinOp(left=left, op=ast.Mult() | ast.Add() as operator, right=right):
                return _joined(self._value(left), self._value(right), isinstance(operator, ast.Mult))
            case ast.Subscript(value=ast.List() as values, slice=index):
                return replace(self._value(index), values=self._value(values))
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if isinstance(getattr(torch, name, None), TORCH):
                return getattr(torch, name)
            case ast.Call(func=ast.Name(id="device"), keywords=keywords):
                return torch.device(**{str(keyword.arg): self._value(keyword.value) for keyword in keywords})
        raise ValueError(f"{ast.unparse(tree)} is no argument")


TORCH = (torch.dtype, torch.memory_format, torch.layout)


def _joined(left: Any, right: Any, product: bool) -> Any:
    """A sum or product in which ranks may stand (`RankIndex.source`), or a complex number."""
    if not isinstance(left, RankIndex):
        return left + right
    if product:
        ((axis, _),) = left.terms
        return RankIndex(((axis, right),))
    if isinstance(right, RankIndex):
        return RankIndex((*left.terms, *right.terms), left.constant)
    return RankIndex(left.terms, left.constant + right)


def _meta(text: str) -> TensorMeta:
    dtype, _, shape = text.rstrip("]").partition("[")
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"there is no dtype {dtype}")
    return TensorMeta(tuple(map(int, filter(None, shape.split(", ")))), getattr(torch, dtype))


def _placement(text: str) -> Placement:
    if match := re.fullmatch(r"S\((\d+)%(\d+)\)", text):
        return Split(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"X\((\d+)%(\d+)\)(?:\*(\d+\.\d+))?", text):
        return Routed(int(match[1]), int(match[2]), float(match[3] or 1.0))
    if match := re.fullmatch(r"P(?:\((\w+)\))?", text):
        return Partial(match[1]) if match[1] else PARTIAL
    if text != "R":
        raise ValueError(f"{text} is no placement: write R, S(dim%period), P, P(max) or X(dim%period)*imbalance")
    return REPLICATE
