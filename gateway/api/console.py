"""``GET /`` and ``GET /console/{name}``: the web console, a static page with its own strict security headers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

import yardstick_llm.gateway.console
from yardstick_llm.gateway.errors import NotFound
from yardstick_llm.gateway.http.connection import Incoming
from yardstick_llm.gateway.http.context import AnyRequest

FOLDER = Path(yardstick_llm.gateway.console.__file__).parent
PAGE = "index.html"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Content Security Policy of the page: it loads and calls this server only, has no inline script or style, cannot be framed, and
cannot turn a text into markup (trusted types)."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # browsers ask each time; the answer is 304 while the file is the same
}


@dataclass(frozen=True)
class File:
    """One file of the console."""

    content: bytes
    media_type: str
    etag: str


def console_routes() -> list[HTTPRouteHandler]:
    """Create the routes, which need no key: the page has no data, and its calls of the API send the user's key."""
    files = console_files()
    front = files[PAGE]

    @get("/", include_in_schema=False)
    async def page(request: AnyRequest) -> Response[bytes]:
        """Serve the page."""
        return _answer(request, front)

    @get("/console/{name:str}", include_in_schema=False)
    async def asset(request: AnyRequest, name: FromPath[str]) -> Response[bytes]:
        """Serve one file that the page loads."""
        if name not in files or name == PAGE:
            raise NotFound("The web console has no such file.")
        return _answer(request, files[name])

    return [page, asset]


def console_files() -> dict[str, File]:
    """Read all files of the console, by name."""
    return {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES}


def _read(path: Path) -> File:
    content = path.read_bytes()
    return File(content, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _answer(request: AnyRequest, file: File) -> Response[bytes]:
    """Return the file, or 304 if the browser has it."""
    headers = HEADERS | {"etag": file.etag}
    known = Incoming.of(request.scope).headers.get(b"if-none-match", b"").decode("latin-1")
    if file.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(b"", status_code=304, headers=headers, media_type=file.media_type)
    return Response(file.content, headers=headers, media_type=file.media_type)
