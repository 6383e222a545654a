"""What a statement kind of the generator is, and how its text becomes code.

    kind("straight through", 2, "{y} = {x} + ({x}.round() - {x}).detach()")

A kind is its text, with fields in braces, and sections for code that does not stand in forward:

    --top     of the source, before the model's class        --before    a step of training (`model`, `step`)
    --init    in `__init__` (`self`)                         --loss      how a step comes to its `loss`
    --make    once the model is made (`model`)               --backward  between backward and the optimizer's step
    --batch   an input of forward (`g` is its generator)     --after     the optimizer's step
    --forward (the default)

| field | what it becomes |
|---|---|
| `{x}`, `{y}` | the value that comes in, and the one that is made |
| `{z}` | an earlier value of the same shape, or `{x}` |
| `{n}` | a number of this statement's own |
| `{w}`, `{l}`, `{r}` | the size of the last dim of x, of the one before, and of the first |
| `{s}`, `{dim}` | its shape, and one of its dims |
| `{f:a}` | an expression of `a` of the same shape |
| `{m}` | a module that keeps the shape of x |
| `{body:a}`, `{b}` | statements that begin with `a`, on lines of their own, and the value that they end with |
| `{init}` | their lines of `__init__`, where the text is a class of its own |
| `{this|that}` | one of these; `{k:=this|that}` names it, and `{k}` repeats it |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import torch

Tensor = torch.Tensor

SECTIONS = ("top", "init", "make", "batch", "before", "loss", "backward", "after", "forward")

LOOP = ("before", "loss", "backward", "after")
"""Sections of the loop that trains the model."""

FUNCTIONS = (
    "{x}.tanh()", "F.gelu({x})", "{x}.sin()", "F.silu({x})", "F.softplus({x})", "{x}.sigmoid()", "{x} * {x}",
    "(-{x} * {x}).exp()", "{x} * {x}.detach().cos()", "{x}.softmax(-1)", "{x} - {x}.mean(0, keepdim=True)",
    "{x}.cumsum(0).sin()", "{x}.clamp(-0.7, 0.9)", "{x}.roll(1, 0)", "F.leaky_relu({x}) * 0.5",
)  # fmt: skip
"""Expressions of a tensor of any shape, which keep it."""

MODULES = (
    "nn.Linear({w}, {w})", "nn.Linear({w}, {w})", "nn.Linear({w}, {w}, bias=False)", "nn.LayerNorm({w})",
    "nn.Sequential(nn.Linear({w}, 8), nn.GELU(), nn.Linear(8, {w}))",
    "nn.Sequential(nn.Linear({w}, 5), nn.Tanh(), nn.Linear(5, {w}))",
    "nn.Sequential(nn.RMSNorm({w}), nn.Linear({w}, {w}))",
)  # fmt: skip
"""Modules that keep the shape."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An entry of a table. One of `texts` is drawn; `when` says for which values of x, and `where` whether it stands in
    any function, in the model's own class alone ("model"), or in a layer that is repeated ("layer")."""

    name: str
    weight: float
    texts: tuple[str, ...]
    when: Callable[[Tensor], bool]
    where: str

    @property
    def has_body(self) -> bool:
        return any("{body:" in text for text in self.texts)

    @property
    def loops(self) -> bool:
        """Whether it is about the loop that trains the model."""
        return any(f"--{name}\n" in text for text in self.texts for name in LOOP)


class Table(dict[str, Kind]):
    """Kinds by name."""

    def __call__(
        self,
        name: str,
        weight: float,
        *texts: str,
        when: Callable[[Tensor], bool] = lambda x: True,
        where: str = "",
    ) -> None:
        assert name not in self, f"two kinds are called {name}"
        of_model = any(f"--{name}\n" in text for text in texts for name in ("make", "batch", *LOOP))
        where = where or ("model" if of_model else "any")
        self[name] = Kind(name=name, weight=weight, texts=tuple(t.strip("\n") for t in texts), when=when, where=where)


FIELD = re.compile(r"\{([^{}]*)\}")


def filled(text: str, fields: Mapping[str, str], draw: Random) -> str:
    """The text with these fields, and with those that are drawn. What is no field stays, such as a dict of Python's."""
    named: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        content = match[1]
        if content in fields:
            return fields[content]
        if content in named:
            return named[content]
        if content.startswith("f:"):
            return FIELD.sub(fields.get(content[2:], content[2:]), draw.choice(FUNCTIONS))
        if content.startswith("body:"):
            return f"{{body:{fields.get(content[5:], content[5:])}}}"
        if content == "m":
            return draw.choice(MODULES)
        if "|" in content:
            naming = re.match(r"(\w+):=", content)
            chosen = draw.choice(content[naming.end() if naming else 0 :].split("|"))
            if naming:
                named[naming[1]] = chosen
            return chosen
        return match[0]

    before = ""
    while before != text:
        before, text = text, FIELD.sub(value, text)
    return text


def sections(text: str) -> dict[str, list[str]]:
    """The lines of each section."""
    found: dict[str, list[str]] = {name: [] for name in SECTIONS}
    at = "forward"
    for line in text.splitlines():
        if (match := re.fullmatch(r"--(\w+)", line)) is not None:
            at = match[1]
        else:
            found[at].append(line)
    return found
