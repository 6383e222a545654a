"""Upsampling of three dims, and bicubic."""

from autopar.ops.registry import know
from autopar.ops.resampling import interpolating, upsampled
from autopar.ops.rules import aten

know({
    **upsampled(3),
    **aten("upsample_bicubic2d upsample_bicubic2d_backward", interpolating(2, 2)),
})  # fmt: skip
