"""Names of models beside those that engines report: aliases and fallbacks, from the settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Names:
    """Both mappings hold names as operators wrote them."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Model that each alias stands for."""
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    """Model that takes the requests of a model without a ready engine."""

    def real(self, name: str) -> str:
        """Return the model that ``name`` stands for: ``name`` itself if it is no alias."""
        return self.aliases.get(name, name)

    def aliases_of(self, model: str) -> list[str]:
        """Return the aliases of ``model``."""
        return [alias for alias, real in self.aliases.items() if real == model]

    def fallbacks_of(self, model: str) -> Iterator[str]:
        """Yield the fallback of ``model``, the fallback of that one, and so on, each once."""
        seen = {self.real(model)}
        while (following := self.fallbacks.get(model)) is not None and (model := self.real(following)) not in seen:
            seen.add(model)
            yield model
