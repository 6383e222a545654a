"""Branches on data that raise: a step goes on where eager would."""

import contextlib
import dis
import sys
from types import CodeType, FrameType

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
    return patched(torch.Tensor, "__bool__", truth)


def passing(frame: FrameType) -> bool | None:
    """The truth value that goes on, where the code at hand in a frame asks for one and raises for the other. None
    where it does not branch, where neither or both ways end in an exception, and where that might be caught.

    A graph of static shapes has no branches. Of `if torch.any(var < 0): raise ValueError(...)` it can have the way on,
    which every call takes that does not fail.
    """
    code = frame.f_code
    instructions = {i.offset: i for i in dis.get_instructions(code)}
    offsets = sorted(instructions)
    # the branch itself, or the conversion to a truth value before it
    for offset in [o for o in offsets if o >= frame.f_lasti][:2]:
        branch = instructions[offset]
        if branch.opname.startswith("POP_JUMP") and branch.opname.endswith(("_TRUE", "_FALSE")):
            jumps_if = branch.opname.endswith("_TRUE")
            jump, stay = (_only_raises(code, start) for start in (branch.argval, _next(offsets, offset)))
            return None if jump == stay else (not jumps_if if jump else jumps_if)
        if branch.opname != "TO_BOOL":
            break
    return None


def _next(offsets: list[int], offset: int) -> int:
    return next(o for o in offsets if o > offset)


def _only_raises(code: CodeType, start: int) -> bool:
    """Whether all ways from an instruction on end in an exception that this code does not catch."""
    instructions = {i.offset: i for i in dis.get_instructions(code)}
    offsets = sorted(instructions)
    caught = [(entry.start, entry.end) for entry in dis.Bytecode(code).exception_entries]  # type: ignore[attr-defined]
    seen, waiting = set(), [start]
    while waiting:
        offset = waiting.pop()
        if offset in seen:
            continue
        seen.add(offset)
        instruction = instructions[offset]
        if any(first <= offset < last for first, last in caught) or offset < start:
            return False
        if instruction.opname.startswith(("RETURN", "YIELD", "SEND")):
            return False
        if instruction.opname in ("RAISE_VARARGS", "RERAISE"):
            continue
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            waiting.append(instruction.argval)
            if instruction.opname.startswith("JUMP_"):  # JUMP_FORWARD, JUMP_BACKWARD: no way on but there
                continue
        waiting.append(_next(offsets, offset))
    return True
