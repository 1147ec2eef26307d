"""``python -m shardcore.cli``."""

import sys

from shardcore.cli import main

if __name__ == "__main__":
    sys.exit(main())
