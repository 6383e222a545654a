"""Precision: the dtypes in which parameters are used and gathered and gradients reduced, beside those in which a module
holds them.

The words are those of FSDP2's `MixedPrecisionPolicy`, and one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
import torch.utils._pytree as pytree

from .tree import flatten

FloatDtype = Literal["float64", "float32", "bfloat16", "float16"]
GatherDtype = Literal["bfloat16", "float16", "float8_e4m3fn"]

if TYPE_CHECKING:
    Dtype = FloatDtype | torch.dtype
    Gathered = GatherDtype | torch.dtype
else:
    Dtype = FloatDtype
    Gathered = GatherDtype
    """In files, dtypes have names."""

WORDS: tuple[FloatDtype, ...] = get_args(FloatDtype)
NARROW: tuple[GatherDtype, ...] = get_args(GatherDtype)
"""Dtypes in which weights may travel, less precise than that in which they are used."""

T = TypeVar("T")


def _named(field: str, value: Any, words: Sequence[str] = WORDS) -> str | None:
    if value is None:
        return None
    name: Any = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    if not isinstance(name, str) or name not in words:
        raise ValueError(f"{field} is {value!r}: give a floating dtype ({', '.join(words)}), or None")
    return name


def _dtype(name: Any) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How a step casts. The module holds its parameters as the model has them, which are the master weights that the
    optimizer updates: give a float32 model, and `param_dtype=torch.bfloat16`.

    `param_dtype` is what floating parameters are cast to before they are gathered and used, and floating inputs before
    forward unless `cast_forward_inputs` is false. `reduce_dtype` is what gradients of parameters are reduced in, and
    added up in over micro-batches unless they are computed in a wider one; without it, they are reduced as they are
    computed. Where nothing is to be reduced, nothing is cast to it. `output_dtype` is what floating outputs of the
    model are cast to, before a `loss_fn` reads them. Gradients arrive in the dtype that the module holds parameters
    in. None leaves a dtype as it is. Buffers are never cast.

    `gather_dtype` is what parameters may travel in where ranks gather or exchange them, narrower than what they are
    used in, if the step is shorter so; afterwards they are as wide as before, and forward and backward both use what
    arrived. float8_e4m3fn travels with a scale for each 128 elements.

    Dtypes may be given as `torch.bfloat16` or "bfloat16", and are kept as text. Raises ValueError for what is no
    floating dtype, and for a `gather_dtype` that is not narrower than `param_dtype`.
    """

    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    output_dtype: Dtype | None = None
    cast_forward_inputs: bool = True
    gather_dtype: Gathered | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            object.__setattr__(self, name, _named(name, getattr(self, name)))
        object.__setattr__(self, "gather_dtype", _named("gather_dtype", self.gather_dtype, NARROW))
        if self.param_dtype is not None:
            self.check_narrower(self.used_in(torch.float32))
        if not isinstance(self.cast_forward_inputs, bool):
            raise ValueError(f"cast_forward_inputs is {self.cast_forward_inputs!r}: give True or False")

    @property
    def given(self) -> dict[str, Any]:
        """What is not as by default."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @property
    def travelling_as_used(self) -> Precision:
        """The same without what parameters may travel in."""
        return replace(self, gather_dtype=None)

    @property
    def reduced_in(self) -> torch.dtype | None:
        """The dtype in which gradients are reduced, if it is another one than that in which they are computed."""
        return _dtype(self.reduce_dtype)

    @property
    def gathered_in(self) -> torch.dtype | None:
        """The dtype in which parameters are gathered, if it is another one than that in which they are used."""
        return _dtype(self.gather_dtype)

    def check_narrower(self, *used_in: torch.dtype) -> None:
        """Raises ValueError where parameters used in these dtypes would travel in no narrower one."""
        if (
            used_in
            and self.gathered_in is not None
            and all(used.itemsize <= self.gathered_in.itemsize for used in used_in)
        ):
            words = " and ".join(str(used).removeprefix("torch.") for used in used_in)
            raise ValueError(
                f"gather_dtype is {self.gather_dtype}, and parameters are used in {words}, which is no "
                f"wider: give a narrower one, or leave it out"
            )

    def used_in(self, held: torch.dtype) -> torch.dtype:
        """The dtype in which operators use a parameter that the module holds in `held`."""
        wanted = _dtype(self.param_dtype)
        return held if wanted is None or not held.is_floating_point else wanted

    def cast_inputs(self, inputs: T) -> T:
        """Nested inputs of the model, cast as forward reads them."""
        return _cast(inputs, _dtype(self.param_dtype)) if self.cast_forward_inputs else inputs

    def cast_outputs(self, outputs: T) -> T:
        """Nested outputs of the model, cast as the caller gets them."""
        return _cast(outputs, _dtype(self.output_dtype))


AS_IS = Precision()
"""Nothing is cast."""


def _cast(tree: T, dtype: torch.dtype | None) -> T:
    if dtype is None:
        return tree
    pairs, spec = flatten("output", tree)
    leaves = [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for _, x in pairs]
    result: T = pytree.tree_unflatten(leaves, spec)
    return result
