"""Benchmarks are scripts outside the packages: their folder goes to the end of the search path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
