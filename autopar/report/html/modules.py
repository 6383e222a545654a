"""The modules of a model, nested, with the shards of each parameter drawn; equal modules whose names differ in a number
are one, with their count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from autopar.ir.tree import joined
from autopar.planning.plan import ParameterPlan, Plan
from autopar.planning.texts import grouped

from ..facts import count_text
from ..words import parameter_words
from .drawing import tensor_svg


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
        own = sum(math.prod(plan.shape) for _, plan in self.parameters)
        return self.count * (own + sum(module.elements for module in self.modules))

    def walk(self) -> Iterator[Module]:
        yield self
        for module in self.modules:
            yield from module.walk()


def module_tree(name: str, parameters: Mapping[str, ParameterPlan]) -> Module:
    """The model, of parameters by name."""
    return _folded(name, "", [(tuple(path.split(".")), plan) for path, plan in parameters.items()])


def _folded(name: str, path: str, inside: Sequence[tuple[tuple[str, ...], ParameterPlan]]) -> Module:
    """A module, of the parameters in it by the parts of their names."""
    own = tuple((parts[0], plan) for parts, plan in inside if len(parts) == 1)
    below = grouped((first, (tuple(rest), plan)) for (first, *rest), plan in inside if rest)
    inner: list[Module] = []
    for part, module in below.items():
        made = _folded(part, joined(path, part), module)
        if inner and _follows(inner[-1], part) and _key(inner[-1]) == _key(made):
            first = inner[-1].name.partition(" ")[0]
            inner[-1] = replace(inner[-1], name=f"{first} to {part}", count=inner[-1].count + 1)
        else:
            inner.append(made)
    return Module(name=name, path=path, parameters=own, modules=tuple(inner))


def _follows(last: Module, part: str) -> bool:
    end = last.name.rpartition(" ")[2]
    return end.isdigit() and part.isdigit() and int(part) == int(end) + 1


def _key(module: Module) -> object:
    """Equal for modules that have the same parameters, planned alike; names of the modules themselves do not count."""
    own = tuple((name, plan, plan.shape) for name, plan in module.parameters)
    return own, tuple((inner.name, inner.count, _key(inner)) for inner in module.modules)


def modules_html(plan: Plan) -> str:
    """The model as nested modules that fold."""
    return _module(module_tree(plan.model, plan.parameters), plan, depth=0)


def _module(module: Module, plan: Plan, depth: int) -> str:
    """A module that folds. Modules of parameters alone, such as linear layers, are rows of the one that they are in."""
    count = f" <b>× {module.count}</b>" if module.count > 1 else ""
    size = f'<span class="dim"> {count_text(module.elements)} parameters</span>'
    body = [_table(_parameter(module.path, name, name, plan) for name, _ in module.parameters)]
    rows: list[str] = []
    for inner in module.modules:
        if inner.modules or inner.count > 1:
            body += [_table(rows), _module(inner, plan, depth + 1)]
            rows = []
        else:
            rows += (_parameter(inner.path, name, f"{inner.name}.{name}", plan) for name, _ in inner.parameters)
    body.append(_table(rows))
    return (
        f'<details class="module" data-name="{escape(module.path)}"{" open" if depth < 4 else ""}><summary>'
        f"<code>{escape(module.name)}</code>{count}{size}</summary>{''.join(body)}</details>"
    )


def _table(rows: Iterable[str]) -> str:
    text = "".join(rows)
    return f'<table class="tensors">{text}</table>' if text else ""


def _parameter(path: str, name: str, shown: str, plan: Plan) -> str:
    full = joined(path, name)
    parameter = plan.parameters[full]
    use = parameter.in_use[0] if parameter.in_use else parameter.at_rest
    words = parameter_words(parameter, tuple(plan.mesh))
    shape = " × ".join(f"{length:,}" for length in parameter.shape)
    uses = list(dict.fromkeys(" ".join(layout) for layout in parameter.in_use)) or ["nowhere"]
    return (
        f'<tr class="parameter" data-name="{escape(full)}"><td><code>{escape(shown)}</code><br>'
        f'<span class="dim">{shape}</span></td>'
        f"<td>{tensor_svg(parameter.shape, parameter.at_rest, plan.mesh)}</td>"
        f'<td class="dim">at rest<br><code>{escape(" ".join(parameter.at_rest))}</code></td>'
        f"<td>{tensor_svg(parameter.shape, use, plan.mesh)}</td>"
        f'<td class="dim">in use<br><code>{escape(" or ".join(uses))}</code></td>'
        f"<td>{escape(words)}</td></tr>"
    )
