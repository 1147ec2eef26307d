"""``python -m shardcore.launch``."""

from __future__ import annotations

import sys

from shardcore.launch import main

sys.exit(main())
