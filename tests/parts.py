"""Programs that tests need and that Python does not bring. :func:`need` is the only way to one, so no test declares what it needs.

Without the program the test is skipped, and the reason names Debian's package. The test fails if the environment variable
``REQUIRE`` names the part, as that of ``.ci/run`` does: ``REQUIRE=redis,browser``.
"""

from __future__ import annotations

import os
import shutil

import pytest

PARTS = {
    "redis": ("redis-server", ["redis-server"]),
    "browser": ("chromium", ["chromium", "chromium-browser", "google-chrome"]),
    "promtool": ("prometheus", ["promtool"]),
    "kubectl": ("kubernetes-client", ["kubectl"]),
    "openssl": ("openssl", ["openssl"]),
    "curl": ("curl", ["curl"]),
    "git": ("git", ["git"]),
    "gcc": ("gcc", ["gcc"]),
    "node": ("nodejs", ["node"]),
    "npm": ("npm", ["npm"]),
}
"""The Debian package of each part, and the names of its program."""


def need(part: str) -> str:
    """Return the path of the program of ``part``."""
    package, names = PARTS[part]
    for name in names:
        if path := shutil.which(name):
            return path
    reason = f"needs {part}: apt-get install {package}"
    if part in required():
        pytest.fail(f"{reason} (REQUIRE={os.environ['REQUIRE']})", pytrace=False)
    pytest.skip(reason)


def required() -> set[str]:
    names = set(filter(None, os.environ.get("REQUIRE", "").split(",")))
    if unknown := names - PARTS.keys():
        raise pytest.UsageError(f"REQUIRE names {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}.")
    return names
