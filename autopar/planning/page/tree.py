"""The modules of a model, nested, with their parameters; equal modules whose names differ in a number are one, with
their count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..record import ParameterPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """`name` is the last part of its path, or a range of numbers ("0 to 31") for `count` equal modules; `path` is that
    of the first of them."""

    name: str
    path: str
    count: int = 1
    parameters: tuple[tuple[str, ParameterPlan], ...] = ()
    modules: tuple[Module, ...] = ()

    @property
    def elements(self) -> int:
        """Of all parameters, those of all of its copies."""
        own = sum(_elements(plan) for _, plan in self.parameters)
        return self.count * (own + sum(module.elements for module in self.modules))

    def walk(self) -> Iterator[Module]:
        yield self
        for module in self.modules:
            yield from module.walk()


def _elements(plan: ParameterPlan) -> int:
    size = 1
    for length in plan.shape:
        size *= length
    return size


@dataclass(slots=True)
class _Node:
    parameters: dict[str, ParameterPlan] = field(default_factory=dict)
    modules: dict[str, _Node] = field(default_factory=dict)


def module_tree(name: str, parameters: Mapping[str, ParameterPlan]) -> Module:
    """The model, of parameters by name."""
    root = _Node()
    for path, plan in parameters.items():
        *modules, last = path.split(".")
        node = root
        for part in modules:
            node = node.modules.setdefault(part, _Node())
        node.parameters[last] = plan
    return _folded(name, "", root)


def _folded(name: str, path: str, node: _Node) -> Module:
    inner: list[Module] = []
    keys: list[object] = []
    for part, module in node.modules.items():
        made = _folded(part, f"{path}.{part}" if path else part, module)
        key = _key(made)
        last = inner[-1] if inner else None
        if last is not None and part.isdigit() and keys[-1] == key and _follows(last, part):
            first = last.name.partition(" ")[0]
            inner[-1] = Module(
                name=f"{first} to {part}",
                path=last.path,
                count=last.count + 1,
                parameters=last.parameters,
                modules=last.modules,
            )
        else:
            inner.append(made)
            keys.append(key)
    return Module(name=name, path=path, parameters=tuple(node.parameters.items()), modules=tuple(inner))


def _follows(last: Module, part: str) -> bool:
    end = last.name.rpartition(" ")[2]
    return end.isdigit() and int(part) == int(end) + 1


def _key(module: Module) -> object:
    """Equal for modules that have the same parameters, planned alike; names of the modules themselves do not count."""
    own = tuple((name, plan, plan.shape) for name, plan in module.parameters)
    return own, tuple((inner.name, inner.count, _key(inner)) for inner in module.modules)
