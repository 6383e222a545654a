"""Checkpoints of training runs: all that a run needs to go on, on as many ranks or others, by another plan.

A checkpoint is a folder that `torch.distributed.checkpoint` writes and reads, with states of models and optimizers
under the models' own names. It gets its name once it is complete, so a run that dies meanwhile leaves those before.
"""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.compat.distributed import patient
from autopar.files import cut

from .agreement import all_equal, on_first_rank, together
from .module import ParallelModule
from .save import PARTIAL


def save(folder: str | Path, *parts: Any, step: int, keep: int = 3) -> None:
    """Write a checkpoint of a training run to a `folder`: after `step` 123 its `step-000123`. All ranks at once:

        autopar.save("checkpoints", model, optimizer, schedule, step=step)

    `parts` are parallel modules, their optimizers, and whatever else has `state_dict` and `load_state_dict`:
    schedulers, scalers, averaged models, counters of your own. With them come the states of Python's, numpy's and
    torch's random generators on the first rank, and the plan (`plan.json`). Of the checkpoints up to this step, the
    newest `keep` stay; one of the same step is replaced. All ranks must see the folder.

    A run that is killed while it saves leaves the checkpoints before. Raises ValueError, the same on every rank, for
    what cannot be saved.
    """
    modules, ways = _ways(parts)
    mesh = modules[0].mesh
    if not isinstance(step, int) or step < 0 or keep < 1:
        raise ValueError(f"step is {step!r} and keep {keep!r}: give whole numbers, at least 0 and 1")
    path = Path(folder).absolute() / f"step-{step:06}"
    all_equal(str(path), mesh, "the ranks are to save different steps, or to different folders")
    part = path.with_suffix(PARTIAL)
    on_first_rank(partial(shutil.rmtree, part, ignore_errors=True), mesh)
    by_ranks("save", modules[0], ways, part)
    on_first_rank(partial(_finish, modules, part, path, keep), mesh)


def load(folder: str | Path, *parts: Any) -> int:
    """Read the newest complete checkpoint of a `folder` into `parts`, in the order in which `save` got them (those of a
    kind at the end may be left out), and put random generators into the states that they had. All ranks at once, on as
    many as wrote it or on others, with any plan. Returns the step, or 0 where there is no checkpoint yet:

        for step in range(autopar.load("checkpoints", model, optimizer, schedule), steps):

    Raises ValueError, the same on every rank, for a checkpoint of other parts, and for files that cannot be read.
    """
    modules, ways = _ways(parts)
    mesh = modules[0].mesh
    for newest in on_first_rank(lambda: _complete(Path(folder))[:1], mesh):
        by_ranks("load", modules[0], ways, newest)
        return int(newest.name.removeprefix("step-"))
    return 0


class Stateful(NamedTuple):
    """How the state of a part is got, and how one is put into it, as `torch.distributed.checkpoint` calls them."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], object]


def of_optimizer(module: ParallelModule, optimizer: torch.optim.Optimizer) -> Stateful:
    """States by the names of the module's parameters."""
    return Stateful(
        partial(get_optimizer_state_dict, module, optimizer), partial(set_optimizer_state_dict, module, optimizer)
    )


def by_ranks(what: str, module: ParallelModule, ways: dict[str, Stateful], path: Path) -> None:
    """Have PyTorch "save" states to a folder or "load" them, on all ranks of the module, by their group on the hosts.
    Raises ValueError, on all, where any of them cannot."""
    channel = module._state.module.handshake.channel
    group, alone = (channel.group, False) if channel else (None, dist.get_world_size() > 1)
    with together(module.mesh):
        try:
            with patient(group, torch.device("cpu")) if group else nullcontext():  # a short timeout is meant for steps
                getattr(dcp, what)(ways, checkpoint_id=path, process_group=group, no_dist=alone)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise ValueError(
                f"cannot {what} {path} (rank {rank}: {type(cause).__name__}: {cut(str(cause))}): give all "
                f"ranks one folder, and the parts that were saved, in their order"
            ) from error


def _ways(parts: Sequence[Any]) -> tuple[list[ParallelModule], dict[str, Stateful]]:
    """The modules among parts, and the ways of all. Raises ValueError for parts that have no state, or none yet."""
    modules = [part for part in parts if isinstance(part, ParallelModule)]
    if not modules:
        raise ValueError("no parallel module is among the parts: give the module that autopar.parallelize returned")
    if lacking := [name for module in modules for name in module._state.values.on_meta()]:
        raise ValueError(
            f"{lacking[0]} is on meta, and has no value: call materialize, load_pretrained or to_empty first, and make "
            f"the optimizer after that"
        )
    owners = {parameter: module for module in modules for parameter in module.parameters()}
    ways = {"random": _pickled(Stateful(random_states, draw_from))}
    for part in parts:
        if not hasattr(part, "load_state_dict"):
            raise ValueError(f"{part!r:.80} has no load_state_dict: leave it out, or give it that and state_dict")
        stepped = {owners.get(p) for group in getattr(part, "param_groups", ()) for p in group["params"]}
        kind, way = "other", _pickled(part)
        if isinstance(part, torch.nn.Module):
            kind, way = "model", Stateful(part.state_dict, part.load_state_dict)
        elif len(stepped) == 1 and (owner := stepped.pop()) is not None:
            kind, way = "optimizer", of_optimizer(owner, part)
        number = sum(name.startswith(kind) for name in ways)
        ways[f"{kind}_{number}" if number else kind] = way
    return modules, ways


def _pickled(part: Any) -> Stateful:
    """The state of what is no model's, as bytes: PyTorch would take tables apart, and make others of them."""

    def state() -> bytes:
        held = part.state_dict()
        if any(isinstance(x, DTensor) for x in tree_leaves(held)):
            raise ValueError(
                f"{type(part).__name__} has states of which each rank holds a part, and is no optimizer of one module: "
                f"give the module too, and an optimizer to each, made of its parameters as they are now"
            )
        return pickle.dumps(tree_map_only(torch.Tensor, torch.Tensor.cpu, held))

    return Stateful(state, lambda held: part.load_state_dict(pickle.loads(held)))


def random_states() -> tuple[Any, ...]:
    """Those of generators: Python's, numpy's and torch's."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def draw_from(states: tuple[Any, ...]) -> None:
    """Puts generators into these states: Python's, numpy's and torch's."""
    python, numbers, torchs = states
    random.setstate(python)
    np.random.set_state(numbers)
    torch.set_rng_state(torchs)


def _complete(folder: Path) -> list[Path]:
    """The complete checkpoints, the newest first."""
    found = (path for path in folder.glob("step-*") if not path.suffix)
    return sorted(found, key=lambda path: (len(path.name), path.name), reverse=True)


def _finish(modules: Sequence[ParallelModule], part: Path, path: Path, keep: int) -> None:
    """Give a complete checkpoint its name, and remove the oldest."""
    for number, module in enumerate(modules):
        module.plan.save(part / f"plan{number or ''}.json")
    shutil.rmtree(path, ignore_errors=True)
    part.rename(path)
    known = _complete(path.parent)
    for other in known[known.index(path) + keep :]:
        shutil.rmtree(other)
