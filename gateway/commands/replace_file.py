"""Replaces a file as a whole."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from gateway.commands.errors import CommandError


def replace_file(file: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write ``file`` atomically: it keeps what it had if there is an error, and its owner and permissions in any case.

    ``mode``: permissions of a new file, before the umask. Raises :class:`CommandError`.
    """
    try:
        if file.is_symlink() or (file.exists() and not file.is_file()):  # such as /dev/stdout
            file.write_bytes(content)
        else:
            _replace(file, content, mode)
    except OSError as error:
        raise CommandError(f"cannot write {file}: {(error.strerror or str(error)).lower()}") from None


def _replace(file: Path, content: bytes, mode: int) -> None:
    before = file.stat() if file.exists() else None
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)  # left by a killed process, or a link that somebody else made: neither is written to
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode if before is None else 0o600), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())  # before the rename, or a crash of the machine may leave an empty file
            if before is not None:
                with suppress(PermissionError):  # only root may give a file away
                    os.fchown(stream.fileno(), before.st_uid, before.st_gid)
                os.fchmod(stream.fileno(), before.st_mode & 0o7777)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
