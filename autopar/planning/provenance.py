"""Where a plan comes from: the model and its inputs, the cluster's figures, the versions, and the candidates among
which it was chosen.

All of it follows from what the caller gives and from the installed versions of what decides (`VERSIONED`), so that the
same inputs give the same file. The command line adds the command as it was typed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from autopar.cluster.library.write import cluster_toml
from autopar.cluster.machine import Cluster
from autopar.files.kinds import Count
from autopar.ir.graph import JointGraph, TensorMeta
from autopar.ir.layout import Shape
from autopar.ops.rule import call_of
from autopar.ops.rules import rule_of
from autopar.passes.capture.captured import Captured

from .request import Source

VERSIONED = ("autopar", "torch")
"""Packages whose versions a plan carries; so does it that of the model's own package."""

ELSEWHERE = "another descent"
"""What plans of version 0.1 call the end of a descent that began elsewhere."""

EDITED = "edited"
"""The winner of a plan whose decisions a person changed."""

STAGED, UNSTAGED = "search in stages", "search without stages"
"""Where the mesh is chosen: the best plan with an axis of stages, and the best without."""

TOKENS = ("input_ids", "tokens", "decoder_input_ids", "idx")
"""Inputs whose elements are tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that competed with the one that was chosen. `bytes` is its peak, if it was computed. `seconds` are those
    of its step: "simulated", "estimated" from a program of fewer layers, or "at least" so many."""

    name: str
    seconds: float
    precision: str
    bytes: int | float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """`inputs` are types and shapes by name. `items` of the kind `unit` ("tokens", "samples") are computed in a step.
    `flops` are the arithmetic of one step of the whole model, and `ideal_seconds` what it takes at the peak of all
    devices, if their maker publishes one (`Device.has_peak`). `cluster` are the lines of the cluster's file. `winner`
    names the candidate that was chosen: "search", "search again" (a descent's end at the prices of a candidate's
    timeline), those in and without stages (`STAGED`), or a preset. `effort_seconds` were given to the search, if any
    were, and `is_cut` says that it ended with them, or with an interrupt."""

    dtype: str
    inputs: Mapping[str, str]
    unit: str
    items: Count
    parameter_count: Count
    flops: float
    ideal_seconds: float | None
    cluster: tuple[str, ...]
    versions: Mapping[str, str]
    winner: str = "search"
    effort_seconds: int | float | None = None
    is_cut: bool = False
    candidates: tuple[Candidate, ...] = ()
    source: Source | None = None
    command: str = ""

    def times(self, micro_batches: int) -> Provenance:
        """Of a step of several calls."""
        if micro_batches == 1:
            return self
        n, ideal = micro_batches, self.ideal_seconds
        return replace(self, items=n * self.items, flops=n * self.flops, ideal_seconds=ideal and n * ideal)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a plan says of its model: the name, `kinds` of parameters (`kind_of`), and the versions that decide."""

    name: str
    captured: Captured
    kinds: Mapping[str, str]
    versions: Mapping[str, str]

    @staticmethod
    def of(model: nn.Module, captured: Captured) -> ModelFacts:
        package = type(model).__module__.partition(".")[0]
        versions = {name: text for name in (*VERSIONED, package) if (text := _version(name))}
        kinds = {name: kind_of(model, name) for name in captured.graph.parameters}
        return ModelFacts(name=type(model).__name__, captured=captured, kinds=kinds, versions=versions)

    @cached_property
    def flops(self) -> Mapping[torch.dtype, float]:
        """The arithmetic of a step of the whole model, by dtype."""
        return flops_of(self.captured.graph)

    @property
    def shared(self) -> list[str]:
        """The names of parameters that have several."""
        return [name for pair in self.captured.tied.items() for name in pair]

    @property
    def batch(self) -> int:
        """The samples of the example."""
        return samples(meta.shape for meta in input_metas(self.captured).values())

    def provenance(self, cluster: Cluster, ranks: int) -> Provenance:
        graph = self.captured.graph
        metas = input_metas(self.captured)
        given = [(graph.metas[i.name], i.at_rest) for i in graph.inputs if i.role == "parameter"]
        sizes = [TensorMeta(meta.shape, at_rest or meta.dtype) for meta, at_rest in given]
        unit, items = work_of(self.captured)
        peak, has_peak = cluster.device.peak_flops, cluster.device.has_peak
        return Provenance(
            dtype=_most([(str(meta.dtype).removeprefix("torch."), meta.numel) for meta in sizes]),
            inputs={name.removeprefix("kwargs."): str(meta) for name, meta in metas.items()},
            unit=unit,
            items=items,
            parameter_count=sum(meta.numel for meta in sizes),
            flops=sum(self.flops.values()),
            ideal_seconds=sum(flops / peak(d) for d, flops in self.flops.items()) / ranks if has_peak else None,
            cluster=tuple(cluster_toml(cluster, cluster.source).splitlines()),
            versions=self.versions,
        )


DIMS: Mapping[str, tuple[str, ...]] = {
    "linear": ("column", "row"),
    "transposed": ("row", "column"),
    "embedding": ("vocabulary", "features"),
    "convolution": ("output channels", "input channels"),
    "experts": ("experts",),
}
"""What a split of each dim is called, by kind of parameter (`kind_of`)."""


def kind_of(model: nn.Module, parameter: str) -> str:
    """What the dims of a parameter mean: those of "linear", "transposed" (a linear layer that stores inputs first),
    "embedding", "convolution", "experts"; "" if that is not known."""
    path, _, name = parameter.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return ""
    weight, cls = getattr(module, name, None), type(module).__name__
    dims = weight.dim() if isinstance(weight, torch.Tensor) else 0
    if isinstance(module, nn.Linear) or (cls == "Conv1D" and dims == 1):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return "convolution"
    if cls == "Conv1D" and dims == 2:
        return "transposed"
    return "experts" if "Experts" in cls and dims == 3 else ""


def flops_of(graph: JointGraph) -> dict[torch.dtype, float]:
    """The arithmetic of a step, by dtype, without what is made again. An op that computes nothing once is bound by
    memory (`OpRule.flops`), and is not looked at again."""
    flops: dict[torch.dtype, float] = {}
    idle: set[str] = set()
    for node in graph.nodes:
        if node.op in idle or node.serves:
            continue
        rule = rule_of(call_of(node, graph.metas))
        if rule is None or not rule.flops:
            idle.add(node.op)
        else:
            dtype = graph.metas[next(name for name in (*node.inputs, *node.outputs) if name)].dtype
            flops[dtype] = flops.get(dtype, 0.0) + rule.flops
    return flops


def input_metas(captured: Captured) -> dict[str, TensorMeta]:
    """Path of each tensor among the inputs -> its shape and dtype."""
    return {leaf.path: leaf.meta for leaf in captured.input_leaves if leaf.meta is not None}


def work_of(captured: Captured) -> tuple[str, int]:
    """What a step computes: so many tokens, or samples."""
    metas = input_metas(captured)
    for name, meta in metas.items():
        if name.rpartition(".")[2] in TOKENS and not meta.dtype.is_floating_point and len(meta.shape) == 2:
            return "tokens", meta.shape[0] * meta.shape[1]
    return "samples", samples(meta.shape for meta in metas.values())


def samples(shapes: Iterable[Shape]) -> int:
    """The usual first dim of inputs, the first of those that are equally usual: not that of a mask of places or a table
    among them. 1 where none has a dim."""
    return next(iter(Counter(shape[0] for shape in shapes if shape).most_common(1)), (1, 0))[0]


def _most(weighed: Sequence[tuple[str, int]]) -> str:
    """The word with the most weight."""
    weights: dict[str, int] = {}
    for word, weight in weighed:
        weights[word] = weights.get(word, 0) + weight
    return max(weights, key=lambda word: weights[word], default="")


def _version(package: str) -> str:
    """The public version, without a suffix such as +cpu: the same plan is made on any machine."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return ""
