"""The parallel module: DTensor parameters outside, the local program inside."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from autopar.compat.calls import uncompiled
from autopar.compat.optimizing import fused_steps_on_shards
from autopar.compat.outputs import Absent
from autopar.compat.rebinding import HOOKS_OF_STATES, rebind_state_hooks
from autopar.compat.redistributing import numbers_of_shards
from autopar.compat.stages import whole_states_in_stages
from autopar.compat.tensors import is_real
from autopar.compat.waiting import name_waits
from autopar.compat.wrapping import unwrapped
from autopar.ir.program import Program
from autopar.passes.capture.captured import Captured
from autopar.passes.capture.source import presented

from .agreement import agreed, all_equal, digest, follow_world_timeout
from .call import WATCHES, ProgramStep, Watch, prepared_call, refuse_gradients, unwatched
from .compiling import Inductor
from .execute import Executable
from .failures import alone
from .guard import OWNERS, Original
from .handshake import Handshake
from .local_batches import LocalBatches
from .mirrors import MirrorModule, mirrored
from .modes import Again, Planned
from .optimizer_states import checkpoints_of
from .padding import Padder
from .pipelined import Pipelined
from .pretrained import ValuesMixin
from .sharded_optimizers import OPTIMIZERS, on_shards
from .state import ModuleState, State
from .state_dicts import belong
from .values import ModuleValues
from .verify import Verifier
from .versions import Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What calls of a module do beside running its program. `again` captures and plans what no program serves, those
    `planned` are written when they are called for, `padder` fills short batches, `verifier` compares the first steps
    with the model, outputs are gathered if `whole_outputs` says so, and what forward gathers is kept from one
    micro-batch to the next if the module `holds` it. Programs are `compiled` in a mode of `torch.compile`, if one is
    given, and run in stages if they are `pipelined`."""

    again: Again | None = None
    planned: Sequence[Planned] = ()
    whole_outputs: bool = False
    verifier: Verifier | None = None
    padder: Padder | None = None
    holds: bool = False
    compiled: str = ""
    pipelined: Pipelined | None = None


class ParallelModule(ValuesMixin, MirrorModule):
    """A model that runs as `program` on `mesh`. Build it on every rank at once.

    Parameters are DTensors under the model's own names, placed at rest as the program wants them;
    each rank keeps its slice of the model's own values, in memory of its own, and the ranks check
    that they agree on them. Parameters on `meta` stay there until `materialize`. Buffers are plain
    tensors. Submodules, `config` and other attributes are reachable as on the model; the model's
    methods are not, since they would run the model and not the program.

    Plain tensors given to a call are the global batch on every rank, of which the rank takes its
    slice; a DTensor says what it holds. Replicated outputs are plain tensors, and the
    others are DTensors, or, with `whole_outputs`, are gathered. No output shares memory with a parameter, a buffer, an
    input or another output; those that in eager lie in the memory of a parameter or buffer must not be written. If the
    model has a loss, that alone is differentiated: backward raises ValueError where a gradient reaches another output.

    `train()`, `eval()`, `torch.no_grad()`, `torch.autocast()` and `requires_grad_()` mean what they do on the model.
    `to(...)`, `cpu()`, `float()` and the like return the module where device and dtype stay, and raise ValueError where
    they do not.
    The first call in a mode (evaluation, mostly) or with inputs of a form (the smaller last batch, no labels) that no
    program was captured in captures and plans one, by `again`, with the parameters where they are. It takes as long as
    planning does. All ranks must make the same calls: each begins with a handshake, and ranks that differ in mode,
    inputs or count of calls raise one error.

    Raises ValueError, on every rank, if the ranks' programs or weights differ, or if mesh and program do not match.
    """

    _versions: Versions
    _local: LocalBatches
    _original: Original
    _verifier: Verifier | None
    _watch: Watch

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        program: Program,
        plan: object,
        mesh: DeviceMesh,
        options: CallOptions = CallOptions(),
    ) -> None:
        super().__init__()
        checkpoints_of(ParallelModule)
        fused_steps_on_shards()
        numbers_of_shards()
        whole_states_in_stages()
        name_waits(alone)
        follow_world_timeout(mesh)
        plain = unwrapped(model)
        mirrors: dict[int, nn.Module] = {}
        root = mirrored(mirrors, plain)
        rebind_state_hooks(mirrors)
        # the same dictionaries: the root's parameters and submodules are this module's own
        shared = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *HOOKS_OF_STATES)
        vars(self).update((name, vars(root)[name]) for name in shared)
        self.training = captured.training
        vars(self)["_root"] = root
        values = ModuleValues(
            root=root,
            mesh=mesh,
            at_rest={i.target: i.layout for i in program.inputs if i.role == "parameter"},
            tied=captured.tied,
            hooked=captured.hooked,
            homes=None if options.pipelined is None else options.pipelined.homes,
        )
        belong(values)
        state_of_all = ModuleState(
            values=values,
            plan=plan,
            handshake=Handshake(mesh, program.digest),
            compiler=Inductor(options.compiled, mesh) if options.compiled else None,
            whole_outputs=options.whole_outputs,
            holds=options.holds,
        )
        state = State(captured, program, state_of_all, options.pipelined)
        all_equal(
            {name: digest(tensor) for name, tensor in captured.constants.items() if is_real(tensor)},
            mesh,
            "the ranks closed over different tensors (plain attributes of modules, tensors that forward or loss_fn "
            "makes of Python numbers): give every rank the same, or make them buffers",
        )
        vars(self).update(
            _state=state,
            _versions=Versions(self, plain, state, options.again, options.padder, options.planned),
            _local=LocalBatches(state, plain),
            _verifier=options.verifier,
            _watch=unwatched,
        )
        values.distribute(chain(plain.named_parameters(), plain.named_buffers()))
        OWNERS.claim(model, self)
        vars(self)["_original"] = Original(plain, root, captured.reads)

    # -- what a person asks for

    @property
    def program(self) -> Program:
        """What each rank runs for inputs like the example, in the mode that the model was in; its text is readable. In
        other modes, and for inputs of another form, calls run others (`programs`)."""
        return self._state.program

    @property
    def programs(self) -> tuple[tuple[str, Program], ...]:
        """All programs that there are, with the mode and the inputs that each is for; that of the last call first."""
        return self._versions.programs

    @property
    def plan(self) -> Any:
        """The plan that the program was written from."""
        return self._state.module.plan

    @property
    def mesh(self) -> DeviceMesh:
        return self._state.mesh

    @property
    def executable(self) -> Executable:
        """The compiled program; `executable.source` is what runs on this rank."""
        return self._state.executable

    @property
    def input_placements(self) -> dict[str, tuple[Placement, ...]]:
        """Path of each input ("kwargs.input_ids") -> the placements as which a DTensor need not be redistributed."""
        state = self._state
        return {i.target: state.input_placements(i) for i in state.program.inputs if i.role == "input"}

    @property
    def data_size(self) -> int:
        """Into how many parts the ranks split a batch, for the `num_replicas` of a `DistributedSampler`."""
        return self._local.size

    @property
    def data_rank(self) -> int:
        """Which of these parts this rank reads. Ranks with the same number must read the same."""
        return self._local.rank

    def shard_batch(self, batch: Any) -> Any:
        """What this rank's loader gives, its part `data_rank` of `data_size` of a batch, as the inputs of a call:

            sampler = DistributedSampler(dataset, num_replicas=parallel.data_size, rank=parallel.data_rank)
            for batch in DataLoader(dataset, batch_size=of_each_part, sampler=sampler):
                parallel(**parallel.shard_batch(batch)).loss.backward()

        `batch` holds the inputs of the call, by name or in a tuple. Tensors with a row (dim 0) for each sample become
        DTensors of the global batch, and others stay as they are. All parts must have equally many rows. An input that
        the plan splits otherwise is redistributed, at each call. Raises ValueError for what is no batch of the model.
        """
        return self._local.sharded(batch, self._versions.padder)

    def optimizer(self, kind: type[Any], params: Any = None, **options: Any) -> Any:
        """`kind(params, **options)`, whose step runs on what each rank holds: `parallel.optimizer(torch.optim.AdamW,
        lr=3e-4)`. `params` are all of the module's if not given, or some, or groups, as torch takes them.

        It is what it would be of any model: schedulers, `GradScaler` and `torch.distributed.checkpoint` work alike, and
        states go from the one to the other. `torch.optim.Muon` has each matrix orthogonalised by one rank. All ranks
        step at once. Raises ValueError for a kind that is not known to treat each element alone (`ELEMENTWISE`), and
        for parameters of another module.
        """
        values = self._state.values
        given = list(self.parameters() if params is None else params)
        for plug in OPTIMIZERS.values():
            if kind is plug.value.__base__:
                layouts: dict[Any, Any] = {values[name]: values.layout(name) for name in values.aliases}
                made = plug.value(given, layouts=layouts, mesh=values.mesh, **options)
                break
        else:
            made = on_shards(kind)(given, **options)  # type: ignore[arg-type]
        own = set(map(id, self.parameters()))
        if any(id(parameter) not in own for group in made.param_groups for parameter in group["params"]):
            raise ValueError(
                "these are not the parallel module's parameters, which are others than those of the model that it was "
                "made of: give parameters of the parallel module"
            )
        return made

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, `backward()` adds gradients up on each rank and reduces none. The first backward after it reduces
        the sum, in the buckets of the plan:

            for micro_batch in first_ones:
                with parallel.no_sync():
                    (parallel(**micro_batch).loss / count).backward()
            (parallel(**last_one).loss / count).backward()
            optimizer.step()

        `.grad` is what it is in eager PyTorch all the while. To read it, or to step with it, reduces what has been
        added up so far, on all ranks at once; `zero_grad()` and `p.grad = None` drop it. Hooks on parameters see each
        gradient as it comes: where there are any, each backward reduces.

        What is added up has the size of the gradients before their reduction: under fully sharded plans, that of all
        parameters that a rank computes with. All ranks must come to it alike.
        """
        pending = self._state.module.pending
        pending.asks = True
        before, pending.reduces = pending.reduces, False
        try:
            yield
        finally:
            pending.reduces = before

    def check_finite(self, on: bool = True) -> None:
        """From the next call on, raise FloatingPointError on all ranks at the end of a forward or backward pass whose
        results hold NaN or an infinity: it names the first instruction that made one, with its module and rank.
        All ranks must call it alike. Steps take several times as long."""
        self._watch = WATCHES["finite"].value if on else unwatched

    @uncompiled
    @presented()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._original.warn()
        versions = self._versions
        handshake = self._state.module.handshake
        request = versions.request(args, kwargs)
        handshake.begin(request)
        with handshake.running("forward pass"):
            state = versions.serving(request)
            call = prepared_call(state, request.inputs)
            call.watch = self._watch
            if versions.padder is not None:
                call.cut = versions.padder.cut(request.given, state.output_shapes)
            if self._verifier is not None:
                call.check = self._verifier.begin(state, (versions.root, *versions.modules[1:]), request.inputs.tensors)
            if call.differentiable and torch.is_grad_enabled():
                results = ProgramStep.apply(call, *call.differentiable)  # type: ignore[no-untyped-call]
            else:
                results = call.outputs(call.forward()[0])
                refuse_gradients(state, results)
                handshake.settle()
            if call.check is not None:
                pairs = zip(state.output_paths, results, strict=True)
                call.check.forward({path: x for path, x in pairs if not isinstance(x, Absent)}, call.keys)
        versions.lend(state, results)
        outputs = dict(zip(state.output_paths, results, strict=True))
        call.gives(outputs)
        return state.captured.unflatten(outputs)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> None:
        """What DistributedDataParallel asks of a module first."""
        text = "a parallel module reduces its gradients itself: call it as it is, without DistributedDataParallel"
        raise agreed(ValueError(text), self._state.mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with values of its own, on the same mesh with the same programs."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        versions = self._versions
        memo.update((id(p.grad), None) for p in self.parameters() if p.grad is not None)  # as of any copied parameter
        plan, values = self._state.module.plan, self._state.values
        shared = [plan, versions.again, values.mesh, values.ranks, *vars(values).get("meshes", ())]
        shared += [part for version in versions.versions for part in (version.guard, version.pinned, version.planned)]
        memo.update((id(part), part) for part in shared)
        memo[id(versions.lent)] = []
        vars(copied).update(copy.deepcopy(vars(self), memo))
        values = copied._state.values
        values.again()
        belong(values)
        copied._versions.guard_again()
        return copied

    def extra_repr(self) -> str:
        state = self._state
        mesh = " x ".join(f"{axis}={n}" for axis, n in zip(state.program.axes, state.program.mesh, strict=True))
        return f"mesh: {mesh}, program: {state.program.digest}"
