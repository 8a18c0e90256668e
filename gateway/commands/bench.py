"""``yardstick bench``: the benchmarks of the source checkout that this package runs from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gateway.commands.errors import CommandError
from gateway.commands.launch import become, require_engine

_CHECKOUT = Path(__file__).parents[2]


def bench(arguments: Sequence[str], checkout: Path = _CHECKOUT) -> NoReturn:
    """Replace this process with ``python -m benchmarks``. Raises :class:`CommandError` if the package is not in a checkout."""
    if not (checkout / "benchmarks" / "__main__.py").is_file():
        raise CommandError(
            "the benchmarks are not in the installed package; run `python -m benchmarks` in a checkout of the source"
        )
    require_engine()
    # A folder named benchmarks in the current directory must not take precedence over the checkout's.
    os.environ["PYTHONSAFEPATH"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    become("benchmarks", arguments)
