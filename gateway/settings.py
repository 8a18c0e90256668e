"""The gateway's settings: frozen, strict, parsed once at the edge from the environment and the command line."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints
from urllib.parse import urlsplit

import msgspec

from gateway.logs.access import Format
from gateway.pool.discovery.address import parse_address

PREFIX = "YARDSTICK_"
REDIS_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
CacheIsolation = Literal["key", "none"]


class SettingsError(ValueError):
    """A setting is unknown, missing or wrong; the message is one line that names it and the remedy."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be chosen about a gateway. In the environment a setting is ``YARDSTICK_`` and its name in capitals."""

    engines: tuple[str, ...]
    """Where the engines are; separated by commas in the environment. ``http://host:port`` (or ``https``) is one engine;
    ``dns://name:port`` one at each address of a name, such as that of a headless Service; ``kubernetes://service:port`` or
    ``kubernetes://namespace/service:port`` one at each endpoint of a Service (a port's name or number; the gateway's own namespace
    unless given). Engines that serve the same model share its requests, whichever entries they were found by."""
    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, ``api_keys_file`` is required."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    """TCP port to listen on; 0 takes a free one."""
    api_keys_file: Path | None = None
    """JSON file with the API keys' hashes, see ``gateway/auth.py``. None: every caller is welcome."""
    api_keys_stale_seconds: NotNegative = 300.0
    """How long the keys of the last good version stay valid while their file cannot be read or is not valid; after that, requests
    to ``/v1`` are answered 503. A file that is deleted or empty revokes all keys within three seconds."""
    cache_isolation: CacheIsolation = "key"
    """Who shares cached results and prefixes. "key": each API key has its own, unless its ``group`` in the key file names one that
    several keys share. "none": all keys share, for a server of one organisation. ``cache_salt`` in a request separates further."""
    max_body_bytes: Positive = 32 << 20
    """Longest request body, in bytes."""
    max_in_flight: Positive = 1024
    """Requests to ``/v1`` whose body is complete and that are worked on at a time; more are answered 429. With keys, one key gets
    at most four times the room that the others leave free."""
    max_uploads: Positive = 2048
    """Requests to ``/v1`` whose body is still arriving; more are answered 429. Shared between keys like ``max_in_flight``."""
    max_bytes_in_flight: Positive = 256 << 20
    """Bytes of the bodies of all requests in progress, inflated; what would exceed them is answered 429. Shared between keys like
    ``max_in_flight``. At least ``max_body_bytes``."""
    max_connections: Positive = 4096
    """Open connections. Beyond them the one that has waited longest for a request is closed; if none waits, the new one is
    answered 429."""
    max_header_bytes: Annotated[int, msgspec.Meta(ge=1024, le=1 << 20)] = 64 << 10
    """Longest request line and headers together, in bytes; longer ones are answered 431."""
    max_headers: Positive = 128
    """Headers of a request; more are answered 431."""
    header_seconds: Seconds = 10.0
    """Longest time for the request line and headers, from their first byte, before the answer is 408; and for that byte on a new
    connection, before it is closed."""
    idle_seconds: Seconds = 75.0
    """Time after which a connection without a further request is closed. Longer than the idle time of clients and proxies, so that
    they do not reuse a connection that is being closed."""
    body_seconds: Seconds = 30.0
    """Time for a body, before the time that its bytes may take at ``body_bytes_per_second``; then the answer is 408."""
    body_bytes_per_second: Positive = 16 << 10
    """Least rate of a body, on average and after the first ``body_seconds``."""
    write_seconds: Seconds = 30.0
    """Time in which a client must read something of what waits to be sent; then its connection is closed and its work cancelled."""
    allowed_hosts: tuple[str, ...] = ()
    """Without keys: names in the ``Host`` header that are accepted besides ``localhost`` and loopback addresses; others get 421.
    Separated by commas in the environment."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call this server, such as ``https://app.example``, or ``*`` for all; separated by commas in the
    environment."""
    drain_seconds: NotNegative = 0.0
    """After SIGTERM, time in which the gateway is not ready but still serves, so that whoever sends it requests can notice."""
    grace_seconds: Seconds = 30.0
    """After SIGTERM, time until the process ends; requests that are still open are then cut off. Includes ``drain_seconds``."""
    cache_entries: Count = 100_000
    """Results that the in-memory cache holds at most; 0 switches it off."""
    cache_bytes: Count = 64 << 20
    """Memory that the cached results take at most, in bytes."""
    redis_url: str | None = None
    """Redis for results and limits, shared by all gateways: ``redis://``, ``rediss://`` (TLS), ``redis+cluster://`` or
    ``rediss+cluster://``, then ``[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]``. None: both are kept in memory."""
    redis_password_file: Path | None = None
    """File with the password, read at every connection; wins over the URL's."""
    redis_ca_file: Path | None = None
    """PEM file of the authorities that sign Redis's certificate; None: the system's."""
    redis_prefix: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_.:-]{1,64}$")] = "yardstick"
    """What every name in Redis begins with. Gateways that share limits have the same one."""
    redis_seconds: Seconds = 0.05
    """Longest wait of a request for Redis, after which it goes on without."""
    cache_ttl_seconds: Seconds = 86_400.0
    """How long Redis keeps a result, give or take a tenth."""
    probe_seconds: Seconds = 1.0
    """Time between two looks at an engine's readiness."""
    connect_seconds: Seconds = 2.0
    """Longest wait for a connection to an engine."""
    engine_seconds: Seconds = 600.0
    """Longest silence of an engine within a request before it counts as lost."""
    silence_seconds: Seconds = 2.0
    """Time for which an engine may leave a probe unanswered before it is silent: its requests go to other engines, and it gets none
    until it answers. With ``probe_seconds`` it bounds the gap in a stream whose engine stops; time in which the gateway itself is
    blocked does not count."""
    startup_seconds: NotNegative = 60.0
    """After the start, time in which a request for an unknown model is answered 503 and not 404 while an entry of ``engines`` has
    not led to a model yet. An engine that is loading names its model, and for that one the answer is 503 in any case."""
    keepalive_seconds: Seconds = 15.0
    """Time without an event after which a waiting stream gets a comment, so that proxies do not close it (many do after 60 s). A
    stream begins with status 200 when its first event has not come by then; an error before that has its own status."""
    engine_token_file: Path | None = None
    """File whose first line is the token that engines know the gateway by (``Authorization: Bearer``); read again when it changes.
    None: no token is sent."""
    resolve_seconds: Seconds = 5.0
    """Time between two look-ups of the names in ``dns://`` entries."""
    wait_seconds: NotNegative = 10.0
    """Longest wait for an engine where none of a model is ready, before the answer is 503. 0: no waiting."""
    max_waiting: Count = 256
    """Requests that wait so at a time; more are answered 503 at once."""
    eject_failures: Positive = 3
    """Failures in a row after which an engine is left alone for a while (but never more than half of a model's)."""
    eject_seconds: Seconds = 5.0
    """How long that is the first time; it doubles, up to a minute, each time the one request it then gets fails too."""
    split_tokens: Positive = 4096
    """Least work, in tokens, that is worth a sub-batch: smaller score requests go to one engine whole."""

    access_log: Format = "text"
    """How the access log is written to stderr, a line for each request: ``text``, ``json`` or ``off``."""
    access_log_probes: bool = False
    """Log requests to ``/livez``, ``/readyz`` and ``/metrics`` too."""

    max_sequences: Positive = 1024
    """Sequences that one request may generate: its prompts times ``n``."""
    max_request_tokens: Positive = 1 << 20
    """Prompt tokens that one request may bring, what prompts share counted once; with ``echo`` once for each completion."""
    max_request_characters: Positive = 16 << 20
    """Characters of query and items, joined, of one request to a model whose tokeniser cannot read the query once."""
    max_scores: Positive = 1 << 20
    """Scores of one request: its items times its labels."""
    text_workers: Count = 0
    """Processes that read texts, chat templates and long bodies; half of them at most read long ones. 0 starts one for each
    processor, two to four."""
    text_seconds: Seconds = 10.0
    """Longest time that one of these processes may work on a request, after which the answer is 400."""
    template_seconds: Seconds = 2.0
    """Longest time that a model's chat template may take with a request's messages, after which the answer is 400."""
    text_job_mib: Positive = 512
    """Memory that reading one request may take, in MiB, before the answer is 400."""
    text_queue: Positive = 256
    """Requests that wait to be read at a time; more are answered 429."""
    text_queue_bytes: Positive = 256 << 20
    """Bytes of the bodies of those requests; more are answered 429."""
    parse_special_tokens_in_messages: bool = False
    """Whether text such as ``<|im_end|>`` in chat messages becomes a control token where the request does not say."""

    def __post_init__(self) -> None:
        if not self.engines:
            raise SettingsError(_remedy("engines", "no engine is named", "give at least one URL, such as http://127.0.0.1:8100"))
        for entry in self.engines:
            _check_entry(entry)
        if self.redis_url is not None:
            _check_redis_url(self.redis_url)
        for name, file in (("redis_password_file", self.redis_password_file), ("redis_ca_file", self.redis_ca_file)):
            if file is not None and not file.is_file():
                raise SettingsError(_remedy(name, f"there is no file {str(file)!r}", "name one that can be read"))
        if self.api_keys_file is None and not is_loopback(self.host):
            problem = f"{self.host} can be reached from other machines and no API keys are set"
            raise SettingsError(_remedy("api_keys_file", problem, "name a file of keys, or listen on 127.0.0.1"))
        if self.max_bytes_in_flight < self.max_body_bytes:
            problem = f"{self.max_bytes_in_flight} bytes are less than one body of {self.max_body_bytes}"
            raise SettingsError(_remedy("max_bytes_in_flight", problem, f"make it larger, or {PREFIX}MAX_BODY_BYTES smaller"))
        for origin in self.cors_origins:
            _check_origin(origin)
        if self.drain_seconds >= self.grace_seconds:
            problem = f"{self.drain_seconds:g} s leave nothing of the {self.grace_seconds:g} s that it has to end in"
            raise SettingsError(_remedy("drain_seconds", problem, f"make {PREFIX}GRACE_SECONDS longer"))


def load_settings(environment: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """Merge ``environment`` (names that begin with ``YARDSTICK_``) and ``flags`` (by attribute; None means not given; flags win).

    Raises :class:`SettingsError`.
    """
    known = Settings.__struct_fields__
    given: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable[len(PREFIX) :].lower()
        if name not in known:
            choices = ", ".join(PREFIX + field.upper() for field in known)
            raise SettingsError(f"{variable}: there is no such setting; unset it, or use one of {choices}")
        given[name] = [part.strip() for part in text.split(",") if part.strip()] if name in _LISTS else text
    given |= {name: value for name, value in flags.items() if value is not None}
    types = get_type_hints(Settings, include_extras=True)
    return Settings(**{"engines": ()} | {name: _convert(name, value, types[name]) for name, value in given.items()})


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _convert(name: str, value: object, kind: object) -> Any:
    """``value`` as the type of the setting ``name``, also from text."""
    try:
        return msgspec.convert(value, kind, strict=False, dec_hook=lambda to, text: to(text))
    except msgspec.ValidationError as error:
        raise SettingsError(_remedy(name, f"{value!r} does not fit", str(error)[:1].lower() + str(error)[1:])) from None


def _check_entry(entry: str) -> None:
    try:
        parse_address(entry)
    except ValueError as error:
        raise SettingsError(_remedy("engines", f"{entry!r} is not a URL of an engine", str(error))) from None


def _check_origin(origin: str) -> None:
    """An origin as browsers send it (RFC 6454 7.1)."""
    parts = urlsplit(origin)
    known = parts.scheme in ("http", "https") and parts.hostname and origin == f"{parts.scheme}://{parts.netloc}"
    if origin != "*" and (not known or "*" in origin):
        raise SettingsError(_remedy("cors_origins", f"{origin!r} is not an origin", "write it like https://app.example:8443, or *"))


def _check_redis_url(url: str) -> None:
    """The message does not repeat the URL, which may hold a password."""
    likeness = "write it like redis://HOST:6379/0, rediss://USER@HOST or redis+cluster://HOST"
    try:
        parts = urlsplit(url)
        known = parts.scheme in REDIS_SCHEMES and parts.hostname and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:  # the port
        known = False
    if not known:
        raise SettingsError(_remedy("redis_url", "it is not a URL of Redis", likeness))
    database = parts.path.strip("/")
    if database and (parts.scheme.endswith("+cluster") or not database.isascii() or not database.isdigit()):
        raise SettingsError(_remedy("redis_url", f"{database!r} is not a database here", f"{likeness}; clusters have only one"))


def _remedy(name: str, problem: str, remedy: str) -> str:
    flag = _FLAGS.get(name)
    return f"{PREFIX}{name.upper()}{f' ({flag})' if flag else ''}: {problem}; {remedy}"


_LISTS = ("engines", "allowed_hosts", "cors_origins")
_FLAGS = {
    "engines": "--engine",
    "host": "--host",
    "port": "--port",
    "api_keys_file": "--api-keys-file",
    "redis_url": "--redis-url",
}
