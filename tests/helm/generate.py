"""``make chart``: writes parts of the chart's schema, and what is made from the chart, its README and the golden files."""

from __future__ import annotations

from tests.helm.chart import CHART, GOLDEN, SETS, golden
from tests.helm.readme import readme
from tests.helm.schema import schema


def main() -> None:
    (CHART / "values.schema.json").write_text(schema())
    (CHART / "README.md").write_text(readme())
    GOLDEN.mkdir(exist_ok=True)
    for name, values in SETS.items():
        (GOLDEN / f"{name}.yaml").write_text(golden(values))


if __name__ == "__main__":
    main()
