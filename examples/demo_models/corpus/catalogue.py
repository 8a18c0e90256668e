"""An invented catalogue: the products, the words for them, and the combinations that training never contains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

ATTRIBUTES = ("kind", "colour", "material", "use")
"""Attributes, in the order in which wrong ones are reported."""

WORDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "kind": (
        ("shoes", "sneakers", "trainers"),
        ("jacket", "coat"),
        ("shirt", "blouse"),
        ("bag", "satchel"),
        ("hat", "cap"),
        ("gloves", "mittens"),
        ("trousers", "pants"),
        ("dress", "gown"),
        ("scarf", "shawl"),
        ("socks", "stockings"),
        ("sweater", "jumper", "pullover"),
        ("belt", "strap"),
        ("wallet", "purse"),
        ("boots", "wellies"),
        ("skirt", "kilt"),
        ("sandals", "slides"),
        ("shorts", "trunks"),
        ("blanket", "throw"),
        ("cushion", "pillow"),
        ("tent", "shelter"),
    ),
    "colour": (
        ("red", "crimson", "scarlet"),
        ("blue", "azure"),
        ("green", "emerald"),
        ("black", "ebony"),
        ("white", "ivory"),
        ("grey", "ash"),
        ("brown", "chestnut"),
        ("yellow", "lemon"),
        ("pink", "rose"),
        ("purple", "violet"),
        ("orange", "amber"),
        ("beige", "sand"),
    ),
    "material": (
        ("leather", "hide"),
        ("cotton", "jersey"),
        ("wool", "merino"),
        ("silk", "satin"),
        ("linen", "flax"),
        ("canvas", "sailcloth"),
        ("nylon", "ripstop"),
        ("fleece", "plush"),
        ("denim", "jean"),
        ("mesh", "netting"),
    ),
    "use": (
        ("running", "jogging"),
        ("hiking", "trekking"),
        ("winter", "snow"),
        ("summer", "beach"),
        ("office", "business"),
        ("travel", "holiday"),
        ("school", "student"),
        ("evening", "party"),
        ("rain", "storm"),
        ("gym", "sports"),
    ),
}
"""attribute -> concept -> its synonyms. No word stands for two concepts."""

ATTRIBUTE_OF = {word: attribute for attribute, concepts in WORDS.items() for words in concepts for word in words}

HELD_OUT_SYNONYMS = frozenset({("kind", 2), ("kind", 9), ("colour", 1), ("colour", 9), ("material", 4), ("use", 3), ("use", 7)})
"""Concepts (attribute, index) whose synonyms never occur together in a training question; only auxiliary documents pair them."""


@dataclass(frozen=True)
class Product:
    """Concepts by index into :data:`WORDS`; None for an attribute that is not stated."""

    kind: int
    colour: int | None = None
    material: int | None = None
    use: int | None = None

    @property
    def named(self) -> tuple[str, ...]:
        """The attributes that are stated."""
        return tuple(a for a in ATTRIBUTES if self.get(a) is not None)

    def get(self, attribute: str) -> int | None:
        value: int | None = getattr(self, attribute)
        return value

    def only(self, attributes: tuple[str, ...]) -> Product:
        """Return the product with only these attributes and its kind."""
        return Product(self.kind, **{a: self.get(a) for a in attributes if a != "kind"})


def is_held_out(product: Product) -> bool:
    """Whether (colour, use, kind) is one of the tenth of all triples that training never contains."""
    if product.colour is None or product.use is None:
        return False
    return (7 * product.colour + 3 * product.use + product.kind) % 10 == 0


def draw_product(rng: Random, *, held_out: bool = False) -> Product:
    """Draw a product with all attributes, on the requested side of the split."""
    while True:
        product = Product(**{a: rng.randrange(len(WORDS[a])) for a in ATTRIBUTES})
        if is_held_out(product) == held_out:
            return product


def with_wrong(product: Product, attribute: str, rng: Random) -> Product:
    """Return the product with another concept for one attribute."""
    other = rng.randrange(len(WORDS[attribute]) - 1)
    value = product.get(attribute)
    return replace(product, **{attribute: other + (value is not None and other >= value)})


def draw_words(product: Product, rng: Random) -> dict[str, str]:
    """Draw a word for each stated attribute."""
    return {a: rng.choice(WORDS[a][index]) for a in product.named if (index := product.get(a)) is not None}


def as_phrase(words: dict[str, str]) -> str:
    """Return the words as a shopper would write them: ``red leather running shoes``."""
    return " ".join(words[a] for a in ("colour", "material", "use", "kind") if a in words)


def as_title(words: dict[str, str], rng: Random) -> str:
    """Return the words as a catalogue would write them, in one of a few orders: ``jogging sneakers in crimson hide``."""
    style = rng.randrange(4)
    if style == 0:
        return as_phrase(words)
    colour, material, use = (words.get(a) for a in ("colour", "material", "use"))
    looks = " ".join(word for word in (colour, material) if word)
    if style == 1:
        return " ".join(part for part in (use, words["kind"], looks and f"in {looks}") if part)
    if style == 2:
        return " ".join(part for part in (looks, words["kind"], use and f"for {use}") if part)
    return ", ".join(part for part in (words["kind"], use, material, colour) if part)
