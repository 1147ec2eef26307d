"""Imported by the fork server alone: what rank processes need sooner or later, loaded once before they are forked."""

from __future__ import annotations

import torch
import torch.distributed

import shardcore.testing.worker  # noqa: F401

# torch loads its compiler, seconds of imports, when the first optimizer of a process is made.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
