"""Imported by the server that commands of `ranks` fork from: what every one of them would else import for itself."""

import gc

import pytest  # noqa: F401
import torch
import torch.distributed.tensor

import autopar.cli
import autopar.planning.planner  # noqa: F401

torch.set_num_threads(1)
gc.freeze()  # what commands inherit, none of them looks at for garbage
