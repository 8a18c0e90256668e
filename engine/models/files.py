"""Files of a model directory, read strictly: every error names the key, the file and what was expected."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class ModelError(Exception):
    """A model directory is absent, unsupported or damaged.

    The message is one or two plain sentences for the person who starts the engine: which file, key or tensor is wrong (file
    names without their directories) and what to do about it.
    """


def is_gguf(model: Path) -> bool:
    """Whether ``model`` is a GGUF file and no model directory."""
    return model.suffix.lower() == ".gguf" and not model.is_dir()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises :class:`ModelError` that names the file."""
    try:
        raw = load_json(path)
    except FileNotFoundError:
        raise ModelError(f"There is no {path.name} in the model directory; download the model again.") from None
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{path.name} cannot be read as JSON; download the model again.") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path.name} is not a JSON object; download the model again.")
    return raw


def load_json(path: Path) -> Any:
    """The value in a JSON file. Raises ValueError, also for half a surrogate pair, which no message can hold; OSError, and
    RecursionError."""
    text = path.read_text(encoding="utf-8")
    raw = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(raw, ensure_ascii=False).encode()
    return raw


class Keys:
    """The keys of one JSON object. A key set to null counts as absent. Every method raises :class:`ModelError`."""

    def __init__(self, raw: dict[str, Any], file: str) -> None:
        self._raw = raw
        self._file = file

    def error(self, key: str, problem: str) -> ModelError:
        """The error to raise about ``key``; ``problem`` continues the sentence "key in file …"."""
        return ModelError(f"{key} in {self._file} {problem}.")

    def is_null(self, key: str) -> bool:
        """Whether the key is there and null."""
        return key in self._raw and self._raw[key] is None

    def present(self, key: str) -> bool:
        return self._raw.get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self._get(key, default)
        if not _is_int(value) or value < 1:
            raise self._wrong(key, value, "a whole number of at least 1")
        return int(value)

    def whole(self, key: str) -> int:
        """A whole number of at least 0."""
        value = self._get(key, None)
        if not _is_int(value) or value < 0:
            raise self._wrong(key, value, "a whole number of at least 0")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number greater than 0."""
        value = self._get(key, default)
        if not _is_number(value):
            raise self._wrong(key, value, "a number greater than 0")
        return float(value)

    def is_whole(self, key: str) -> bool:
        """Whether the key is absent or -1, which stands for all."""
        return self._raw.get(key) in (None, -1)

    def numbers(self, key: str) -> list[float]:
        """A list of at least one finite number greater than 0."""
        value = self._get(key, None)
        if not isinstance(value, list) or not value or not all(_is_number(item) for item in value):
            raise self._wrong(key, value, "a list of numbers greater than 0")
        return [float(item) for item in value]

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.present(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of at least one string."""
        value = self._get(key, None)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of strings")
        return value

    def flags(self, key: str) -> list[bool]:
        """A list of true or false, or of 1 or 0; empty where the key is absent."""
        value = self._raw.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(item in (0, 1) for item in value):
            raise self._wrong(key, value, "a list of true or false")
        return [bool(item) for item in value]

    def numbers_like(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Return a list of finite numbers greater than 0, of the length of ``default``."""
        value = self._get(key, list(default))
        right = isinstance(value, list) and len(value) == len(default)
        if not right or not all((_is_int(each) or isinstance(each, float)) and 0 < each < math.inf for each in value):
            raise self._wrong(key, value, f"a list of {len(default)} numbers greater than 0")
        return tuple(map(float, value))

    def ids(self, key: str) -> list[int]:
        """One token id or a list of them; none where the key is absent."""
        value = self._raw.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(_is_int(item) and item >= 0 for item in ids):
            raise self._wrong(key, value, "a token id or a list of token ids")
        return ids

    @property
    def pad_token_id(self) -> int | None:
        """None where there is no padding token; early configurations of Llama have -1 for none."""
        return None if self._raw.get("pad_token_id") == -1 else next(iter(self.ids("pad_token_id")), None)

    def numbered(self, key: str) -> list[str]:
        """The strings (numbers as strings) of an object whose keys are the numbers from 0 up, in order of number; none where it is
        absent."""
        value = self._raw.get(key)
        if value is None:
            return []
        numbers = [str(number) for number in range(len(value))] if isinstance(value, dict) else []
        if not numbers or set(value) != set(numbers) or not all(isinstance(name, (str, int, float)) for name in value.values()):
            raise self._wrong(key, value, "an object of names by number, from 0 up")
        return [str(value[number]) for number in numbers]

    def section(self, key: str) -> Keys | None:
        """A nested object; None where it is absent or empty."""
        value = self._raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Keys(value, f"{key} of {self._file}") if value else None

    def sections(self) -> list[Keys]:
        """All nested objects."""
        found = (self.section(key) for key, value in self._raw.items() if isinstance(value, dict))
        return [section for section in found if section is not None]

    def first_object(self) -> str | None:
        """The first key whose value is itself an object."""
        return next((key for key, value in self._raw.items() if isinstance(value, dict)), None)

    def _get(self, key: str, default: Any) -> Any:
        value = self._raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{key} is missing from {self._file}; download the model again or correct the file.")
        return value

    def _wrong(self, key: str, value: Any, expected: str) -> ModelError:
        return self.error(key, f"is {value!r:.80}, but must be {expected}; correct the file")


def _is_number(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and 0 < value < math.inf


def _is_int(value: Any) -> bool:
    """Whether it is a whole number of at most 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 64
