"""LoRA adapters: what an engine has, and the messages that load and unload them."""

from __future__ import annotations

import re

import msgspec

ADAPTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Names of adapters. They have no colon, which separates base and adapter in ``base:adapter`` for clients."""


class Adapter(msgspec.Struct, tag="adapter", frozen=True, omit_defaults=True):
    """An adapter that requests may name."""

    name: str
    """See :data:`ADAPTER_NAME`; not the name of the base model."""
    digest: str
    """Digest of weights and configuration, hexadecimal: what :attr:`engine.wire.Score.adapter` names."""
    rank: int
    """Largest rank of its matrices."""
    bytes: int
    """Host memory that it takes."""
    capabilities: list[str]
    """Capabilities for requests with this adapter; see :attr:`engine.wire.Info.capabilities`."""
    classes: list[str] = []
    """Classes for requests with this adapter; see :attr:`engine.wire.Info.classes`."""
    multi_label: bool = False
    """For requests with this adapter; see :attr:`engine.wire.Info.multi_label`."""
    regression: bool = False
    """For requests with this adapter; see :attr:`engine.wire.Info.regression`."""


class Adapters(msgspec.Struct, tag="adapters", frozen=True, omit_defaults=True):
    """The adapters of an engine, by name."""

    adapters: list[Adapter]
    max_adapters: int = 0
    """Most adapters in host memory; 0: the engine takes none."""
    max_rank: int = 0
    problem: str = ""
    """Why it takes none, as a clause."""


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True, omit_defaults=True):
    """Load an adapter in PEFT's format. Loading equal files under the same name again changes nothing."""

    name: str
    path: str
    """A directory on the engine's machine, or a hub id."""
    replace: bool = False
    """Replace an adapter of this name that has another digest; without this, that is an error."""


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """Unload an adapter. Requests in progress finish with its weights."""

    name: str
