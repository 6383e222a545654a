"""Optimizers: what each keeps of a parameter, and what a step of it moves."""

from collections.abc import Collection
from dataclasses import dataclass

from autopar.cluster.machine import Device
from autopar.ir.graph import TensorMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """`states` tensors of a parameter's shape, with elements of `state_bytes` (None: as those of the parameter);
    `master_weights` keeps a float32 copy of parameters of narrower dtypes; `bytes_per_element` is kept beside, and
    so is a counter of steps of `counter_bytes`. While a parameter is updated, `copies` more of its size are alive. With
    `on_host`, states lie in the host's memory between steps (`runtime.host_states`)."""

    name: str
    states: int = 0
    state_bytes: int | None = None
    master_weights: bool = False
    bytes_per_element: float = 0.0
    counter_bytes: int = 0
    copies: int = 0
    on_host: bool = False

    def bytes(self, parameter: TensorMeta) -> int:
        """Kept on the device of a parameter (or of the part of it that a rank has)."""
        return self.counter_bytes + self._bytes_of_elements(parameter) * (not self.on_host)

    def brought_bytes(self, parameter: TensorMeta) -> int:
        """Copied from the host for a step, and back."""
        return self._bytes_of_elements(parameter) * self.on_host

    def moved_bytes(self, parameter: TensorMeta) -> int:
        """Read and written by a step: the parameter and the states twice, the gradient once."""
        return 3 * parameter.bytes + 2 * self._bytes_of_elements(parameter)

    def seconds(self, device: Device, parameters: Collection[TensorMeta]) -> float:
        """Of a step on parameters (or parts of them), and of copies of its states, which nothing hides. Raises
        ValueError where there are such copies and nothing says how quick the device is at them."""
        seconds = device.optimizer_seconds(self.name, sum(map(self.moved_bytes, parameters)))
        brought = sum(map(self.brought_bytes, parameters))
        return seconds + 2 * device.host_seconds(brought) if brought else seconds

    def _bytes_of_elements(self, parameter: TensorMeta) -> int:
        each = parameter.dtype.itemsize
        wide = 4 if self.master_weights and each < 4 else 0
        return round(parameter.numel * (self.states * (self.state_bytes or each) + wide + self.bytes_per_element))


OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer(name="adamw", states=2, counter_bytes=4, copies=2),
        Optimizer(name="adamw_fp32", states=2, state_bytes=4, master_weights=True, counter_bytes=4, copies=2),
        Optimizer(name="sgd"),
        Optimizer(name="sgd_momentum", states=1),
    )
}
"""adamw is `torch.optim.AdamW` (moments of the parameter's dtype, and a float32 that counts steps), Adam and the like;
adamw_fp32 keeps float32 moments, and float32 weights where the model has narrower ones; sgd keeps nothing, sgd_momentum
one buffer."""
