"""Plans by what is measured: by the ranks of a mesh, or by this process alone."""

from collections.abc import Callable
from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh

from autopar.ir.garbage import uncollected
from autopar.planning.candidates import Candidates, Profiled
from autopar.planning.costs import COSTS, CostMode
from autopar.planning.micro import check_measured
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.request import Request
from autopar.profile.database import Profiles
from autopar.profile.programs import Costs, Measure

from .profiler import bench_alone, bench_of, lead


def profiled(
    planner: Planner,
    mesh: DeviceMesh | None,
    request: Request,
    *,
    report: Callable[[float, str], None] = lambda part, what: None,
) -> tuple[Plan, Profiled]:
    """The plan that is best by what the ranks of a mesh measure, and what that took. To be called by all of them.
    Without a mesh, by operators that this process measures on its device, and links as the cluster says (hybrid).

    The first rank keeps what is measured in the planner's database, and tells `report` the part of the rounds that is
    done, and what is measured next. Raises ValueError, on every rank, as `plan`, and where the database is none.
    """
    check_measured(planner.training)
    optimizer = planner.optimizer.name
    bench = (
        bench_alone(planner.kind_of_device, planner.example_values, optimizer)
        if mesh is None
        else bench_of(mesh, planner.example_values, optimizer)
    )

    def search(measure: Measure) -> tuple[Plan, Profiled]:
        profiles = Profiles(planner.asked.profiles)
        with uncollected():
            return Candidates(
                planner=planner,
                costs=Costs(
                    profiles=profiles, machine=bench.machine, cluster=planner.cluster, with_links=mesh is not None
                ),
                measure=measure,
                request=replace(request, cost="hybrid" if mesh is None else "profiled"),
                report=report,
            ).run()

    if mesh is None:
        return search(bench.measured)
    best: tuple[Plan, Profiled] = lead(bench, search)
    return best


def _hybrid(planner: Planner, request: Request) -> Plan:
    return profiled(planner, None, request)[0]


def _of_ranks(planner: Planner, request: Request) -> Plan:
    raise ValueError(
        "profiled costs are measured by the ranks: give cost='profiled' to parallelize(), or run autopar "
        "profile under torchrun or autopar lab; on one device, cost='hybrid' measures operators alone"
    )


HYBRID = CostMode(name="hybrid", meaning="the analytical one, with operators that this device measured", plan=_hybrid)
PROFILED = CostMode(
    name="profiled",
    meaning="the analytical one, with operators, collectives and segment programs that the ranks measured",
    plan=_of_ranks,
)
COSTS.know(HYBRID, PROFILED)
