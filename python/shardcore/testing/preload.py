"""Imported by the fork server alone: what rank processes need sooner or later, loaded once before they are forked."""

from __future__ import annotations

import torch
import torch.distributed

import shardcore.testing.decorator
import shardcore.testing.memory
import shardcore.testing.reference
import shardcore.testing.twin
import shardcore.testing.worker
import shardcore.testing.zoo  # noqa: F401

# torch loads its compiler, seconds of imports, when the first optimizer of a process is made.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
