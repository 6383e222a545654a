"""The programs of a parallel module, one for each mode, form of inputs, state of Python and values read of inputs."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from autopar.compat.autocast import autocast_dtype
from autopar.compat.calls import versions
from autopar.compat.watching import hooks_gradient
from autopar.ir.program import Program
from autopar.passes.capture.captured import Captured
from autopar.passes.capture.concrete import Pinned
from autopar.passes.capture.leaves import same_value

from .agreement import all_equal, telling, together
from .guard import Guard, report_changed
from .handshake import Intent
from .inputs import Form, Inputs, declared
from .modes import Again, Mode, Planned
from .padding import Padder
from .pipelined import Pipelined
from .places import gathered, local_part
from .state import State, trained_by

logger = logging.getLogger("autopar")

PINNED_MOST = 8
"""Programs that are kept for a mode and a form, by what they read of inputs; those that were called last."""

PROGRAMS_MOST = 32
"""Programs that are kept in all; those that were called last."""

RECAPTURES_MANY = 8
"""So many captures for other inputs are warned of, and twice as many, and so on."""

KEYS_MOST = 256


@dataclass(frozen=True)
class ProgramKey:
    """What a call wants of a program. One object for all calls that want the same."""

    mode: Mode
    form: Form
    frozen: tuple[str, ...] = field(default=(), compare=False)
    """The parameters that are not trainable in this mode, for people."""

    @cached_property
    def text(self) -> str:
        more = f" and {len(self.frozen) - 3} more" if len(self.frozen) > 3 else ""
        frozen = f", {', '.join(self.frozen[:3])}{more} frozen" if self.frozen else ""
        return f"{self.mode}{frozen}, of {self.form}"

    @cached_property
    def number(self) -> int:
        """63 bits, the same on all ranks."""
        mode = self.mode
        text = repr((mode.training, sorted(mode.trainable), mode.gradients, str(mode.autocast), self.form))
        text += repr(self.form.spec)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


@dataclass(kw_only=True, slots=True, eq=False)
class _Version:
    """A program, and what it is right for."""

    key: ProgramKey
    guard: Guard
    pinned: Pinned
    state: State | None
    """None until the program is written that is `planned`."""
    planned: Planned | None = None
    served: bool = False
    """Whether a call has run it. Ranks wait for each other before the first one."""

    @property
    def text(self) -> str:
        return self.key.text + (f", by {self.pinned}" if self.pinned else "")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallRequest(Intent):
    """One call of the module. Where there is an error, there is nothing else."""

    key: ProgramKey = field(default=None)  # type: ignore[assignment]
    inputs: Inputs = field(default=None)  # type: ignore[assignment]
    given: Inputs = field(default=None)  # type: ignore[assignment]
    """The inputs before they were padded."""
    ready: _Version | None = None


class Versions:
    """The program for each mode and form of inputs that the module is called with."""

    def __init__(
        self,
        parallel: nn.Module,
        model: nn.Module,
        state: State,
        again: Again | None,
        padder: Padder | None = None,
        planned: Sequence[Planned] = (),
    ) -> None:
        self.base, self.again, self.padder = state, again, padder
        # the parallel module stands for the model; submodules are its mirrors, in the same order
        self.modules = tuple(parallel.modules())
        values = state.values
        self.parameters = {
            name: values.owners[name] for name in values.aliases if isinstance(values[name], nn.Parameter)
        }
        captured = state.captured
        asked = {o.target for o in captured.graph.outputs if o.role == "gradient"}
        self.differentiated = frozenset(i.target for i in captured.graph.inputs if i.role == "input") & asked
        """Inputs that required a gradient when the model was captured: each call says whether they do."""
        trained = {o.target for o in state.gradient_outputs if o.name is not None}
        mode = Mode(
            training=tuple(m.training for m in model.modules()),
            trainable=frozenset(self.parameters.keys() & trained | set(captured.without_gradient))
            | self.differentiated,
            gradients=bool(state.tangents)
            or (torch.is_grad_enabled() and not any(p.requires_grad for p in model.parameters())),
            autocast=captured.autocast,
        )
        self.root, self.loss_fn = state.values.root, getattr(again, "loss_fn", None)
        self.named, self.identities = declared(self.root), captured.reads.identities

        def key(captured: Captured) -> ProgramKey:
            return self._key(mode, Inputs.captured(captured, self.root).form)

        self.versions: list[_Version] = [
            *(self._version(key(one.captured), one.captured, None, one) for one in planned),
            self._version(key(captured), captured, state),
        ]
        """That of the last call comes last."""
        self.keys: dict[tuple[Any, ...], ProgramKey] = {}
        self.device_type = state.device.type
        self.calls, self.recaptures = 0, 0
        self.lent: list[tuple[str, str, torch.Tensor, int]] = []
        """Outputs of the last call that eager has in the memory of a parameter or buffer: path, name, what this rank
        holds, and its version."""

    def lend(self, state: State, results: Sequence[torch.Tensor]) -> None:
        """Take note of the outputs of a call, which the caller must not write where eager's model would change."""
        shares = {leaf.path: leaf.shares for leaf in state.captured.output_leaves if leaf.shares}
        pairs = zip(state.output_paths, results, strict=True) if shares else ()
        lent = [(path, shares[path], local_part(x).detach()) for path, x in pairs if path in shares]
        self.lent = [(*each, version) for each, version in zip(lent, versions(x for *_, x in lent), strict=True)]

    def _check_lent(self) -> None:
        lent, self.lent = self.lent, []
        for path, name, tensor, version in lent:
            if versions([tensor]) != [version]:
                raise ValueError(
                    f"{path}, which the last call returned, was written in place: eager returns the memory of {name} "
                    f"there, which would change, and a parallel module returns a value. Write {name} of the module, or "
                    f"write a clone() of the output"
                )

    def key(self, inputs: Inputs) -> ProgramKey:
        """What a call with these inputs wants of a program, in the mode that the module is in now."""
        gradients, cast = torch.is_grad_enabled(), autocast_dtype(self.device_type)
        training = tuple(m.training for m in self.modules)
        trains = tuple(slot.registry[slot.key].requires_grad for slot in self.parameters.values())
        inside = frozenset(path for path in self.differentiated if _trains(inputs.leaves.get(path)))
        now = (cast, gradients, training, trains, inside, inputs.form)
        key = self.keys.get(now)
        if key is None:
            trainable = {name for name, trains in zip(self.parameters, trains, strict=True) if trains}
            mode = Mode(training=training, trainable=inside | trainable, gradients=gradients, autocast=cast)
            made = self._key(mode, inputs.form)
            if len(self.keys) == KEYS_MOST:
                self.keys = {}  # programs stay
            self.keys[now] = key = next((v.key for v in self.versions if v.key == made), made)
        return key

    def _key(self, mode: Mode, form: Form) -> ProgramKey:
        frozen = tuple(name for name in self.parameters if name not in mode.trainable)
        return ProgramKey(mode=mode, form=form, frozen=frozen)

    def _serves(self, version: _Version, key: ProgramKey) -> bool:
        """Whether a program is of a key, whatever Python and inputs hold now."""
        own = version.key
        return own is key or (self.again is None and own.form == key.form and own.mode.covers(key.mode))

    def request(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallRequest:
        """A call, with what is ready for it: the program that served the last such call, if it still does, whatever the
        inputs' values."""
        try:
            self.base.values.check()
            self._check_lent()
            given = inputs = Inputs.of(args, kwargs, self.named, identities=self.identities)
            self.versions[-1].guard.reads.check_inputs(inputs.tensors)
            if self.padder is not None:
                inputs = self.padder.padded(given)
            key = self.key(inputs)
            ready = next((version for version in reversed(self.versions) if self._serves(version, key)), None)
            if ready is not None and not (ready.served and ready.guard.holds()):
                ready = None
        except Exception as error:  # on this rank: `Handshake.begin` raises it on all
            return CallRequest.failed(error)
        return CallRequest(
            number=key.number,
            text=key.text,
            has_program=ready is not None,
            defers=self.base.module.pending.asks and not any(map(hooks_gradient, self.base.values.tensors())),
            reads=ready is not None and bool(ready.pinned),
            tensors=inputs.tensors,
            key=key,
            inputs=inputs,
            given=given,
            ready=ready,
        )

    @property
    def programs(self) -> tuple[tuple[str, Program], ...]:
        """What each is for, and the program; that of the last call first."""
        return tuple((v.text, v.state.program) for v in reversed(self.versions) if v.state is not None)

    def serving(self, request: CallRequest) -> State:
        """What serves a call; the module captures again where nothing is ready for it."""
        key, inputs, ready = request.key, request.inputs, request.ready
        if ready is None or (ready.pinned and not self._reads(ready, inputs)):
            ready = self._choose(key, inputs)
        self.calls += 1
        state = ready.state or self._written(ready)
        if ready is not self.versions[-1]:
            logger.debug("call %d runs program %s, for %s", self.calls, state.program.digest, ready.text)
            self.versions = [*(version for version in self.versions if version is not ready), ready][-PROGRAMS_MOST:]
        ready.served = True
        return state

    def _written(self, version: _Version) -> State:
        """What runs a program that is planned, which is written now."""
        began, planned = time.monotonic(), version.planned
        assert planned is not None
        with together(self.base.mesh):
            program = planned.write()
        version.state = state = self.base.with_program(planned.captured, program)
        logger.info("wrote a program that was planned in %.1f s, for %s", time.monotonic() - began, version.text)
        return state

    def guard_again(self) -> None:
        """Guard the modules that these modes are of now, and no others."""
        for version in self.versions:
            version.guard, version.served = Guard(self.root, self.loss_fn, version.guard.reads), False

    def _version(
        self, key: ProgramKey, captured: Captured, state: State | None, planned: Planned | None = None
    ) -> _Version:
        """Of a step that a program serves, which may have been captured of another one."""
        guard = Guard(self.root, self.loss_fn, captured.reads)
        return _Version(key=key, guard=guard, pinned=captured.pinned, state=state, planned=planned)

    def _reads(self, version: _Version, inputs: Inputs) -> bool:
        """Whether a program's numbers are those of these inputs, on all ranks alike."""
        bound = {path: gathered(inputs.leaves[path]) for path in version.pinned.inputs}
        with together(self.base.mesh):
            differs = version.pinned.differs(bound, inputs.leaves)
        all_equal(
            differs is None,
            self.base.mesh,
            f"the ranks read different {version.pinned}: a plain tensor is the global batch and must be the same on "
            f"every rank",
        )
        return differs is None

    def _choose(self, key: ProgramKey, inputs: Inputs) -> _Version:
        changed: list[str] = []
        others: list[_Version] = []
        for version in self.versions:
            if not self._serves(version, key):
                continue
            if not version.guard.holds():
                changed = version.guard.changed
            elif version.pinned and not self._reads(version, inputs):
                others.append(version)
            else:
                return version
        if others:
            self._report_read(others)
        elif changed:
            report_changed(changed, possible=self.again is not None)
        return self._captured(key, inputs)

    def _captured(self, key: ProgramKey, inputs: Inputs) -> _Version:
        """A program for this call, which takes as long as planning does."""
        mode = key.mode
        if self.again is None:
            self.base.captured.bound(inputs.leaves)
            raise ValueError(
                f"the module has a program for {self.versions[0].key.mode}, and is called for {mode}: call train(), "
                f"eval() and requires_grad_() as when it was captured, or make it with autopar.parallelize"
            )
        began = time.monotonic()
        alike = [v.state for v in self.versions if v.key.form == key.form and v.state is not None]
        try:
            with telling(f"capturing again, for {mode}", self.base.mesh):
                captured, program = self.again(mode, self.root, [state.captured for state in alike], inputs)
        except Exception as error:  # of any class: the model's own too
            error.add_note(f"while the module was captured again, for {mode}{self._differs(key)}")
            raise
        if isinstance(program, int):
            served = [state for state in alike if state.program is alike[program].program]
            frozen = self.parameters.keys() - (mode.trainable if mode.gradients else set())
            same = [
                state
                for state in served
                if same_values(state.captured, captured) and state.trained - frozen == trained_by(captured)
            ]
            state = same[0] if same else self.base.with_program(captured, served[0].program, served[0].pipelined)
        elif isinstance(program, Pipelined):
            state = self.base.with_program(captured, program.outside, program)
        else:
            state = self.base.with_program(captured, program)
        version = self._version(key, captured, state)
        seconds = time.monotonic() - began
        self.base.module.observed.capture_seconds += seconds
        self._report_captured(key, isinstance(program, int), seconds)
        return version

    def _report_captured(self, key: ProgramKey, is_served: bool, seconds: float) -> None:
        """A line for each capture, and a warning when they do not end."""
        differs = self._differs(key)
        served = "; an existing program serves it" if is_served else ""
        logger.info("captured again in %.1f s, for %s%s%s", seconds, key.mode, differs, served)
        self.recaptures += bool(differs)
        if differs and self.recaptures >= RECAPTURES_MANY and not self.recaptures & (self.recaptures - 1):
            logger.warning(
                "%d of %d calls had inputs of another form and captured and planned again, which takes long; %d "
                "programs are kept. The last was for %s%s. Pad batches to few shapes: "
                "parallelize(padding=autopar.Padding(...), lengths=(...)) does",
                self.recaptures, self.calls + 1, PROGRAMS_MOST, key.mode, differs,
            )  # fmt: skip

    def _differs(self, key: ProgramKey) -> str:
        """In what its inputs differ from those of the last call in the same mode, or in any."""
        same_mode = [version for version in self.versions if version.key.mode == key.mode]
        form = (same_mode or self.versions)[-1].key.form
        return "" if form == key.form else f", where {key.form.differs(form)}"

    def _report_read(self, others: Sequence[_Version]) -> None:
        """Say that the programs of a mode read other numbers; the one that was called longest ago is dropped if there
        are too many. Raises ValueError where another cannot be had."""
        pinned = others[0].pinned
        if self.again is None:
            raise ValueError(
                f"the program is right for other {pinned}: give the inputs that it was captured with, or make the "
                f"module with autopar.parallelize, which captures again"
            )
        logger.warning(
            "the model's Python reads %s, and these differ from those of the %s: it is captured and planned again, "
            "which takes long, and %d programs are kept. What differs from batch to batch should be computed with "
            "tensors (a mask, torch.where), not read",
            pinned,
            "program" if len(others) == 1 else f"{len(others)} programs",
            PINNED_MOST,
        )
        if len(others) >= PINNED_MOST:
            self.versions.remove(others[0])


def _trains(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def same_values(captured: Captured, other: Captured) -> bool:
    """Whether two steps of the same operators read equal constants and put their outputs together alike."""
    if captured.output_spec != other.output_spec or captured.constants.keys() != other.constants.keys():
        return False
    leaves = zip(captured.output_leaves, other.output_leaves, strict=True)
    return all((a.path, a.meta) == (b.path, b.meta) and same_value(a.constant, b.constant) for a, b in leaves) and all(
        tensor.device == other.constants[name].device and same_value(tensor, other.constants[name])
        for name, tensor in captured.constants.items()
    )
