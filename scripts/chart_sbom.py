#!/usr/bin/env python3
"""Prints the list of the chart's parts (SBOM, CycloneDX 1.6 in JSON): the images that its pods run, which have lists of their own.

``chart_sbom.py [REGISTRY]``: images of this project are those of REGISTRY; by default, of the chart's value ``image.registry``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

CHART = Path(__file__).parents[1] / "helm"
PARTS = (("gateway", ""), ("engine", ""), ("engine", "-cuda"))
"""Images of this project, and what their tags add to the version."""


def main() -> int:
    """Print the list."""
    chart, values = (CHART / "Chart.yaml").read_text(), (CHART / "values.yaml").read_text()
    registry = sys.argv[1] if len(sys.argv) > 1 else value_of("  registry", values)
    version = value_of("appVersion", chart)
    images = [f"{registry}/yardstick-{part}:{version}{variant}" for part, variant in PARTS]
    about = {"type": "application", "name": "yardstick", "version": value_of("version", chart), "bom-ref": "chart"}
    components = [component(image) for image in (*images, value_of("  image", values))]
    parts = [part["bom-ref"] for part in components]
    told = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": about},
        "components": components,
        "dependencies": [{"ref": "chart", "dependsOn": parts}, *({"ref": part} for part in parts)],
    }
    json.dump(told, sys.stdout, indent=2)
    print()
    return 0


def value_of(key: str, text: str) -> str:
    """The text behind ``key``, with its indentation, in a YAML file."""
    found = re.search(rf"^{key}: (\S+)$", text, flags=re.M)
    if found is None:
        raise SystemExit(f"chart_sbom.py: the chart has no {key.strip()}")
    return found[1]


def component(image: str) -> dict[str, Any]:
    """The part for an image. Form of its URL: https://github.com/package-url/purl-spec/blob/main/types/oci-definition.json"""
    repository, _, tag = image.rpartition(":")
    name = repository.rpartition("/")[2]
    place = f"pkg:oci/{name}?repository_url={quote(repository, safe='')}&tag={tag}"
    return {"type": "container", "name": repository, "version": tag, "purl": place, "bom-ref": image}


if __name__ == "__main__":
    sys.exit(main())
