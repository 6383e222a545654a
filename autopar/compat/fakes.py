"""The mode under which tensors are fakes: shapes, and no data."""

from torch._subclasses import FakeTensorMode


def fake_mode(kind: type[FakeTensorMode] = FakeTensorMode) -> FakeTensorMode:
    """A fresh mode under which tensors have shapes and no data. Real tensors that a model closes
    over are let in (and become constants of the graph)."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return kind(allow_non_fake_inputs=True, shape_env=ShapeEnv(), export=True)
