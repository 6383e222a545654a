"""The search over meshes: all ways to write a number of devices as a product of axes.

Axes lie on a cluster from the outermost in, so (2, 512) and (512, 2) are two meshes. Each gets one descent, and the
best few a thorough search. (Bounds of several axes are too far below the plans to rule out a mesh, and take longer than
a descent.)
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

from autopar.solve.effort import EFFORT

AXES = ("a", "b", "c", "d")
"""Names of axes, from the outermost in."""

T = TypeVar("T")


def meshes(devices: int, most: int = EFFORT.mesh_axes, count: int = EFFORT.meshes) -> list[dict[str, int]]:
    """The meshes of so many devices with at most `most` axes of two ranks or more: at most `count` of them, those with
    the narrowest axes."""
    every = list(_products(devices, most))
    chosen = {axes for _, axes in zip(range(count), sorted(every, key=max), strict=False)}
    sizes = [axes for axes in every if axes in chosen]
    return [dict(zip(AXES, axes, strict=False)) for axes in sizes] or [{AXES[0]: 1}]


def _products(number: int, most: int) -> Iterator[tuple[int, ...]]:
    if number > 1 and most:
        yield (number,)
        for first in range(2, number // 2 + 1):
            if number % first == 0:
                yield from ((first, *rest) for rest in _products(number // first, most - 1))


def best_mesh(
    candidates: Sequence[Mapping[str, int]],
    quick: Callable[[Mapping[str, int], float], float],
    thorough: Callable[[Mapping[str, int]], tuple[float, T]],
    report: Callable[[str], None],
    finalists: int = EFFORT.mesh_finalists,
    is_over: Callable[[], bool] = lambda: False,
) -> T:
    """The best result of `thorough` on the `finalists` meshes on which `quick` has the least seconds.

    `quick` gets a mesh and the seconds that it must undercut to matter, and returns the seconds of some plan's step, or
    infinity. `thorough` returns a better plan with its seconds. Raises what `thorough` raises if no mesh has a plan.

    Once one mesh has a result, `is_over` says whether no time is left for others.

    Meshes without a wide axis come first: they are mostly the best, and take the least time.
    """
    estimates: list[tuple[float, Mapping[str, int]]] = []
    for mesh in sorted(candidates, key=lambda mesh: max(mesh.values())):
        limit = sorted(seconds for seconds, _ in estimates)[finalists - 1] if len(estimates) >= finalists else math.inf
        estimates.append((quick(mesh, limit), mesh))
        report(f"mesh {dict(mesh)}: {estimates[-1][0] * 1e3:.3f} ms")
    errors: list[ValueError] = []
    results: list[tuple[float, T]] = []
    for _, mesh in sorted(estimates, key=lambda entry: entry[0])[:finalists]:
        if results and is_over():
            break
        try:
            results.append(thorough(mesh))
            report(f"mesh {dict(mesh)}, thoroughly: {results[-1][0] * 1e3:.3f} ms")
        except ValueError as raised:
            errors.append(raised)
    if not results:
        raise min(errors, key=lambda error: getattr(error, "smallest_bytes", math.inf))
    return min(results, key=lambda entry: entry[0])[1]


def mesh_of(mesh: DeviceMesh) -> dict[str, int]:
    """Axis name -> size of a torch mesh. Raises ValueError for a mesh without axis names."""
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"the mesh of shape {tuple(mesh.shape)} has no axis names: make it with "
            'init_device_mesh(..., mesh_dim_names=("dp", "tp"))'
        )
    return dict(zip(names, mesh.shape, strict=True))
