"""``make chart``: writes what is made from the chart, its README and the golden files."""

from __future__ import annotations

from tests.helm.chart import CHART, GOLDEN, SETS, golden
from tests.helm.readme import readme


def main() -> None:
    """Write them all."""
    (CHART / "README.md").write_text(readme())
    GOLDEN.mkdir(exist_ok=True)
    for name, values in SETS.items():
        (GOLDEN / f"{name}.yaml").write_text(golden(values))


if __name__ == "__main__":
    main()
