"""`python -m kvloom` is the `kvloom` command."""

from __future__ import annotations

import sys

from kvloom.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
