"""helm/README.md, made from the comments of helm/values.yaml: the block of comments above a key is its description."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import yaml

from tests.helm.chart import CHART

_KEY = re.compile(r"^( *)([A-Za-z][\w.-]*|[a-z./-]+/[a-z./-]+):")
_TABLE = "\n| value | default | meaning |\n| --- | --- | --- |\n"

HEAD = """\
# The chart

`helm install yardstick ./helm` installs Yardstick with the demo model on CPUs. The README of the repository has the next steps,
under "On Kubernetes"; [docs/operations.md](../docs/operations.md) describes operation.

The chart needs Kubernetes 1.23 or newer. `make release REGISTRY=registry.example.com/yardstick` builds
the images, and pushes them and this chart with their digests; install it from `oci://registry.example.com/yardstick/charts/yardstick`.
Or build them with `make images`, load them into the nodes or push them yourself, and name the registry in `image.registry`.

## Values

`make chart` writes this part from [values.yaml](values.yaml). [values.schema.json](values.schema.json) refuses all other keys.
"""


class Described(NamedTuple):
    """A key of values.yaml and the comments above it."""

    path: str
    default: Any
    text: str


def readme() -> str:
    """The page. Raises ValueError where a value has no description."""
    found = list(described())
    groups = {value.path for value in found if any(other.text and other.path.startswith(f"{value.path}.") for other in found)}
    told = {value.path for value in found if value.text} - groups
    lines = [HEAD, "\n### Names\n", _TABLE]
    for value in found:
        if value.path in groups:
            if "." not in value.path:
                lines += [f"\n### {value.path}\n\n{value.text}\n" if value.text else f"\n### {value.path}\n", _TABLE]
        elif value.text:
            lines.append(f"| `{value.path}` | `{json.dumps(value.default, ensure_ascii=False)}` | {value.text} |\n")
        elif not any(value.path.startswith(f"{path}.") for path in told):
            raise ValueError(f"{value.path} has no description")
    return "".join(lines)


def described() -> Iterator[Described]:
    text = (CHART / "values.yaml").read_text()
    defaults = yaml.safe_load(text)
    above: list[str] = []
    path: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            above.append(line.lstrip(" #"))
            continue
        if match := _KEY.match(line):
            path = [*path[: len(match[1]) // 2], match[2]]
            yield Described(".".join(path), reduce(dict.__getitem__, path, defaults), " ".join(above))
        above = []
