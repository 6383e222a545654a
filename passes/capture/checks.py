"""Branches on data that raise: a step goes on where eager would."""

import contextlib
import dis
import sys
from collections.abc import Mapping
from types import FrameType

import torch

from autopar.compat.patching import patched
from autopar.compat.tensors import is_fake


def without_checks(lines: dict[str, None]) -> contextlib.AbstractContextManager[None]:
    """Branches on data that raise are taken not to; `lines` receives where they are. (A mode would not see those in
    torch's own functions.)"""

    def truth(tensor: torch.Tensor) -> bool:
        frame = sys._getframe(1)
        goes_on = passing(frame) if is_fake(tensor) else None
        if goes_on is None:
            return bool(original(tensor))
        lines[f"{frame.f_code.co_filename}:{frame.f_lineno}"] = None
        return goes_on

    original = torch.Tensor.__bool__
    truth.__name__ = original.__name__
    return patched(torch.Tensor, __bool__=truth)


def passing(frame: FrameType) -> bool | None:
    """The truth value that goes on, where the code at hand in a frame asks for one and raises for the other. None
    where it does not branch, where neither or both ways end in an exception, and where that might be caught.

    A graph of static shapes has no branches. Of `if torch.any(var < 0): raise ValueError(...)` it can have the way on,
    which every call takes that does not fail.
    """
    code = dis.Bytecode(frame.f_code)
    instructions = [*code]
    begin = next(i for i, each in enumerate(instructions) if each.offset >= frame.f_lasti)
    # the branch itself, or the conversion to a truth value before it
    for place, branch in enumerate(instructions[begin : begin + 2], begin):
        if branch.opname.startswith("POP_JUMP") and branch.opname.endswith(("_TRUE", "_FALSE")):
            places = {each.offset: i for i, each in enumerate(instructions)}
            jump, stay = (_only_raises(code, places, start) for start in (places[branch.argval], place + 1))
            jumps_if = branch.opname.endswith("_TRUE")
            return None if jump == stay else (not jumps_if if jump else jumps_if)
        if branch.opname != "TO_BOOL":
            break
    return None


def _only_raises(code: dis.Bytecode, places: Mapping[int, int], start: int) -> bool:
    """Whether all ways from an instruction on end in an exception that this code does not catch. `places` are those of
    instructions, by offset."""
    instructions = [*code]
    caught = [(entry.start, entry.end) for entry in code.exception_entries]  # type: ignore[attr-defined]
    seen, waiting = set(), [start]
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        instruction = instructions[place]
        if any(first <= instruction.offset < last for first, last in caught) or place < start:
            return False
        if instruction.opname.startswith(("RETURN", "YIELD", "SEND")):
            return False
        if instruction.opname in ("RAISE_VARARGS", "RERAISE"):
            continue
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            waiting.append(places[instruction.argval])
            if instruction.opname.startswith("JUMP_"):  # JUMP_FORWARD, JUMP_BACKWARD: no way on but there
                continue
        waiting.append(place + 1)
    return True
