"""Print the requirements in pyproject.toml, one on each line: ``python scripts/requirements.py [EXTRA ...]``."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
print(*project["dependencies"], *(line for extra in sys.argv[1:] for line in project["optional-dependencies"][extra]), sep="\n")
