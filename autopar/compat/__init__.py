"""The one place that touches private torch API. It serves torch 2.11, 2.12 and 2.13.

Everything here is thin: a name of ours for something of torch's that may move between versions. Importing it under
another torch raises `ImportError`.
"""

from . import versions as versions
