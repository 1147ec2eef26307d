"""What the installed torch writes into its schedule files."""

from __future__ import annotations

import torch

WAITS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)
"""Whether sends and reductions are waited for in them."""
