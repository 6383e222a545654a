"""Two steps of a model one after the other, on fakes: does the second compute what the first did?

Every tensor gets a number that stands for how it was computed: operator, operands, constants, whether gradients were
recorded. Equal numbers mean equal expressions. Inputs, parameters and buffers have the same numbers in both steps; what
the first one left behind in Python has a number of its own in the second, unless it is made of constants alone, for
then it is the same in each step (a cached table of sines).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import compat


class Numbering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers expressions while operators run."""

    def __init__(self, leaves: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: dict[tuple[Any, ...], int] = {}
        self.constant: set[int] = set()
        self.of: dict[int, int] = {}
        self.written: dict[int, int] = {}  # storage -> what was last written into it
        self.kept: list[Any] = list(leaves.values())
        self.leaves = {id(tensor): self._number("leaf", name) for name, tensor in leaves.items()}
        self.storages = {compat.memory_of(tensor) for tensor in leaves.values()}
        self.draws = 0
        self.earlier: dict[int, torch.Tensor] = {}
        """Numbers that tensors of an earlier step have in this one."""
        self.read: dict[int, torch.Tensor] = {}
        """Those of them that this step read."""

    def again(self) -> None:
        """Begin the next step."""
        tensors = {id(tensor): tensor for tensor in self.kept if isinstance(tensor, torch.Tensor)}
        for identity, number in self.of.items():
            if number not in self.constant:
                self.of[identity] = self._number("earlier", number)
                self.earlier[self.of[identity]] = tensors[identity]
        self.written = {s: n for s, n in self.written.items() if s not in self.storages}
        self.draws = 0

    def key(self, tensor: torch.Tensor) -> tuple[int, int | None, bool]:
        """What a tensor is: expression, what was written into its memory, and whether it requires a gradient."""
        return self._expression(tensor), self.written.get(compat.memory_of(tensor)), tensor.requires_grad

    def same(self, a: torch.Tensor, b: torch.Tensor, before: Mapping[int, tuple[int, int | None, bool]]) -> bool:
        """Whether a tensor of this step is what one of the step before was, whose keys are `before`."""
        return before.get(id(a)) == self.key(b)

    def _number(self, *key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _expression(self, tensor: torch.Tensor) -> int:
        number = self.leaves.get(id(tensor), self.of.get(id(tensor)))
        if number is None:
            value = compat.value_of(tensor)
            number = self._number("constant", id(tensor) if value is None else value, tensor.dtype, tuple(tensor.shape))
            self.constant.add(number)
            self.of[id(tensor)] = number
            self.kept.append(tensor)
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and compat.is_real(args[0]):
            return compat.number_of(args[0])
        flat, spec = pytree.tree_flatten((args, kwargs))
        operands = [self._operand(value) for value in flat]
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        self.draws += random
        number = self._number(
            str(func), str(spec), tuple(operands), torch.is_grad_enabled(), self.draws if random else None
        )
        if not random and all(
            number in self.constant and (written is None or written in self.constant)
            for number, written in (o[1:3] for o in operands if o[0] == "tensor")
        ):
            self.constant.add(number)
        results = func(*args, **kwargs)
        for tensor in compat.written_by(func, args, kwargs):
            self.written[compat.memory_of(tensor)] = number
        given = {id(value) for value in flat if isinstance(value, torch.Tensor)}
        for i, result in enumerate(pytree.tree_leaves(results)):
            if isinstance(result, torch.Tensor) and id(result) not in given:
                self.of[id(result)] = of_result = self._number("result", number, i)
                if number in self.constant:
                    self.constant.add(of_result)
                self.kept.append(result)
        return results

    def _operand(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, torch.Tensor):
            return ("value", type(value), repr(value))
        expression, written, requires_grad = self.key(value)
        for number in (expression, written):
            if number in self.earlier:
                self.read[number] = self.earlier[number]
        return ("tensor", expression, written, requires_grad)
