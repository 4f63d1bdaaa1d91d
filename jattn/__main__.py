"""`python -m jattn`: the commands of `jattn`, if no script of that name is on the path."""

from __future__ import annotations

import sys

from jattn.cli import main

sys.exit(main())
