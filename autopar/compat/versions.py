"""Which versions of torch are served."""

import torch

SERVED = ("2.11", "2.12", "2.13")
PRESENT = ".".join(torch.__version__.split(".")[:2])

if PRESENT not in SERVED:
    raise ImportError(
        f"autopar serves torch {', '.join(SERVED)} and this is torch {torch.__version__}: install one of those"
    )
