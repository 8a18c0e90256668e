"""The gateway's settings: frozen, strict, and parsed once from the environment and the command line.

A setting exists because somebody sets it. Other bounds are constants next to their use, or properties here that follow from a
setting.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints
from urllib.parse import urlsplit

import msgspec

from yardstick_llm.gateway.output.answer import NO_FORMAT, THINKING, Formats
from yardstick_llm.gateway.output.families import FAMILIES
from yardstick_llm.gateway.presets.preset import NO_PRESET, PresetError, named, parse_preset
from yardstick_llm.tracing.export import TracingError
from yardstick_llm.tracing.setup import check_endpoint

PREFIX = "YARDSTICK_"
FLAGS = {
    "engines": "--engine",
    "host": "--host",
    "port": "--port",
    "api_keys_file": "--api-keys-file",
    "redis_url": "--redis-url",
    "presets": "--preset",
    "tool_parsers": "--tool-parser",
    "reasoning_parsers": "--reasoning-parser",
    "aliases": "--alias",
    "fallbacks": "--fallback",
    "image_hosts": "--image-host",
}
"""Options of the command line, by setting."""


class SettingsError(ValueError):
    """A setting is unknown, missing or invalid. The message is one line that names the setting and the remedy."""


def invalid(name: str, problem: str, remedy: str) -> SettingsError:
    """Return the error of the setting ``name``."""
    flag = FLAGS.get(name)
    return SettingsError(f"{PREFIX}{name.upper()}{f' ({flag})' if flag else ''}: {problem}; {remedy}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
CacheIsolation = Literal["key", "none"]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a gateway. In the environment, a setting's name is ``YARDSTICK_`` and the name below in capitals."""

    engines: tuple[str, ...]
    """Addresses of the engines; separated by commas in the environment. ``http://host:port`` (or ``https``) is one engine;
    ``dns://name:port`` is one at each address of a name, such as that of a headless Service; ``kubernetes://service:port`` or
    ``kubernetes://namespace/service:port`` is one at each endpoint of a Service (port: name or number; default namespace: the
    gateway's own). Engines that serve the same model share its requests, whichever entries list them."""
    host: str = "127.0.0.1"
    """Address to listen on; ``*`` means all addresses, of IPv4 and IPv6. Beyond loopback, ``api_keys_file`` is required."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    """TCP port to listen on; 0 takes a free one."""
    api_keys_file: Path | None = None
    """JSON file with the API keys' hashes, see ``gateway/keys.py``. None: requests need no key."""
    api_keys_secret: str | None = None
    """Secret of the gateway's namespace whose entry ``keys.json`` is ``api_keys_file``. It is watched through the Kubernetes API,
    so that a change counts within about a second. The file counts at the start and while the API is away. None: the file alone
    counts."""
    cache_isolation: CacheIsolation = "key"
    """Sharing of cached results and prefixes. "key": keys share only within a ``group`` that the key file gives them. "none": all
    keys share, for a server of one organisation. ``cache_salt`` in a request separates further."""
    max_body_bytes: Positive = 32 << 20
    """Largest request body, in bytes. All requests in progress may have eight times as many together; more are
    answered 429."""
    max_in_flight: Positive = 1024
    """Most requests in progress, other than operational ones, whose body is complete; more are answered 429. With keys, one key
    gets at most four times the room that the others leave free. Twice as many bodies may arrive at a time; a quarter as many
    requests may wait for a text worker, and for a ready engine."""
    max_connections: Positive = 4096
    """Most open connections. A new one beyond this number replaces the connection that has been idle longest; if none is idle, the
    new one is answered 429."""
    idle_seconds: Seconds = 75.0
    """Time after which an idle connection is closed. It should be longer than the idle time of clients and proxies, so that they
    do not reuse a connection that is being closed."""
    allowed_hosts: tuple[str, ...] = ()
    """Without keys: names in the ``Host`` header that are accepted besides ``localhost`` and loopback addresses; others are
    answered 421. Separated by commas in the environment."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call this server, such as ``https://app.example``, or ``*`` for all; separated by commas in the
    environment."""
    drain_seconds: NotNegative = 0.0
    """Time after SIGTERM in which the gateway is not ready but still serves, so that load balancers can notice."""
    grace_seconds: Seconds = 30.0
    """Time from SIGTERM until the process ends; requests that are still open are then cancelled. Includes ``drain_seconds``."""
    cache_bytes: Count = 64 << 20
    """Most memory of the in-memory cache, in bytes; 0 switches it off."""
    redis_url: str | None = None
    """Redis for results and limits, shared by all gateways: ``redis://``, ``rediss://`` (TLS), ``redis+cluster://`` or
    ``rediss+cluster://``, then ``[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]``. None: both are kept in memory."""
    redis_password_file: Path | None = None
    """File with the password, read for every connection; it overrides the URL's password."""
    redis_ca_file: Path | None = None
    """PEM file of the authorities that sign Redis's certificate; None: those of the system."""
    redis_prefix: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_.:-]{1,64}$")] = "yardstick"
    """Prefix of every name in Redis. Gateways that share limits must have the same prefix."""
    redis_seconds: Seconds = 0.05
    """Longest time that a request waits for Redis; after that it continues without Redis."""
    probe_seconds: Seconds = 1.0
    """Interval between two readiness probes of an engine."""
    engine_seconds: Seconds = 600.0
    """Longest silence of an engine within a request before the engine counts as lost."""
    engine_token_file: Path | None = None
    """File whose first line is the token that authenticates the gateway to engines (``Authorization: Bearer``); read again when it
    changes. None: no token is sent."""
    wait_seconds: NotNegative = 10.0
    """Longest time that a request waits for a ready engine of its model, before the answer is 503. 0: requests do not wait."""
    split_tokens: Positive = 4096
    """Least work of a sub-batch, in tokens: smaller score requests go to one engine as a whole."""
    idle_split_tokens: Positive | None = None
    """Least work of a sub-batch for an engine that computes nothing else, in tokens. None: ``split_tokens``."""
    hedge_budget: Annotated[float, msgspec.Meta(ge=0, le=0.1)] = 0.02
    """Extra work for sending late scores to a second engine, as a share of the tokens that engines compute. 0: none are sent."""

    access_log: Literal["json", "off"] = "json"
    """Format of the access log on stderr, which has a line for each request: ``json`` or ``off``."""
    metrics_names: bool = False
    """On a server with keys: whether ``/metrics`` names API keys and engines to everybody who reaches it, and not only to keys with
    ``admin``. Without it, series with the labels ``key`` and ``engine`` are left out."""
    usage_keys: Count = 0
    """API keys whose requests, items and tokens are counted in metrics with their names; further keys are counted together. 0: none
    are."""

    max_sequences: Positive = 1024
    """Most sequences that one request may generate: its prompts times ``n``."""
    max_request_tokens: Positive = 1 << 20
    """Most prompt tokens of one request. A prefix shared by prompts counts once; with ``echo``, prompts count per completion."""
    image_hosts: tuple[str, ...] = ()
    """Hosts that images may be fetched from, separated by commas in the environment: ``HOST``, at the default ports of http and
    https, or ``HOST:PORT``. Empty: only data URLs are accepted."""
    text_workers: Count = 0
    """Processes that read texts, chat templates and long bodies; at most half of them read long ones. 0 starts one for each
    processor, but at least two and at most four."""
    text_seconds: Seconds = 10.0
    """Longest time that one of these processes may work on a request, before the answer is 400."""
    presets: tuple[str, ...] = ()
    """How models are prompted and read: ``MODEL=PRESET`` for each model that should not have the preset that fits its name,
    separated by commas in the environment. PRESET is a name from ``yardstick presets``, a file that ends with ``.toml``, or
    ``none``."""
    tool_parsers: tuple[str, ...] = ()
    """Format in which models call tools: ``MODEL=FORMAT`` for each model whose chat template does not show it, separated by commas
    in the environment. FORMAT is ``hermes``, ``qwen3_coder``, ``deepseek``, ``deepseek_block``,
    ``llama_json``, ``pythonic``, ``mistral``, ``mistral_named`` or ``none``."""
    reasoning_parsers: tuple[str, ...] = ()
    """Format of models' thinking sections: ``MODEL=FORMAT`` for each model whose chat template does not show it, separated by
    commas in the environment. FORMAT is ``think``, ``mistral``, ``seed`` or ``none``."""
    stored_responses_bytes: Count = 256 << 20
    """Most bytes of the responses that are kept for clients that ask for it (``store`` of ``/v1/responses``), in Redis if it is
    configured. Beyond it, the oldest of the API key with most bytes are removed. 0: none are stored."""
    stored_responses_seconds: Seconds = 86_400.0
    """Time for which a response is stored."""
    catalogue_bytes: Positive = 256 << 20
    """Most bytes of all catalogues of registered items, in Redis if it is configured, else in this gateway's memory; a trust group
    may have half of them. Beyond it, registrations are answered 413."""
    aliases: tuple[str, ...] = ()
    """Further names of models: ``ALIAS=MODEL``, separated by commas in the environment. ``/v1/models`` lists them; answers,
    metrics and logs name the model itself."""
    fallbacks: tuple[str, ...] = ()
    """Models that take the generations of others: ``MODEL=FALLBACK``, separated by commas in the environment. Completions, chat
    completions and responses for a model without a ready engine go to its fallback, if the API key may use it; the header
    ``x-yardstick-fallback`` names it."""
    tracing_endpoint: str | None = None
    """Collector of traces: the URL of its OTLP/HTTP port, such as ``http://collector:4318``. None: the variables of OpenTelemetry
    (``OTEL_EXPORTER_OTLP_ENDPOINT``) name it, or requests are not traced."""
    console: bool = True
    """Whether to serve the web console at ``/``."""

    def __post_init__(self) -> None:
        if not self.engines:
            raise invalid("engines", "no engine is named", "give at least one URL, such as http://127.0.0.1:8100")
        for entry in self.engines:
            check_engine(entry)
        if self.redis_url is not None:
            check_redis_url(self.redis_url)
        if self.tracing_endpoint is not None:
            check_tracing_endpoint(self.tracing_endpoint)
        for name, file in (("redis_password_file", self.redis_password_file), ("redis_ca_file", self.redis_ca_file)):
            if file is not None and not file.is_file():
                raise invalid(name, f"there is no file {str(file)!r}", "name one that can be read")
        if self.api_keys_file is None and not is_loopback(self.host):
            problem = f"{self.host} can be reached from other machines and no API keys are set"
            raise invalid("api_keys_file", problem, "name a file of keys, or listen on 127.0.0.1")
        if self.api_keys_secret is not None and self.api_keys_file is None:
            raise invalid(
                "api_keys_secret", "the file that the Secret is mounted at is not named", f"set {PREFIX}API_KEYS_FILE too"
            )
        self.chosen_presets, self.chosen_formats  # noqa: B018  they raise for an invalid entry
        self.chosen_aliases, self.chosen_fallbacks  # noqa: B018  as above
        for origin in self.cors_origins:
            check_origin(origin)
        check_image_hosts(self.image_hosts)
        if self.drain_seconds >= self.grace_seconds:
            problem = f"{self.drain_seconds:g} s are not less than the {self.grace_seconds:g} s in which the gateway must end"
            raise invalid("drain_seconds", problem, f"make {PREFIX}GRACE_SECONDS longer")

    @property
    def chosen_presets(self) -> dict[str, str]:
        """Name or file of the preset of each model in ``presets``. Raises :class:`SettingsError`."""
        chosen = {}
        for entry, model, preset in _of_models("presets", self.presets, "PRESET"):
            if preset != NO_PRESET:
                try:
                    parse_preset(named(preset).encode())
                except PresetError as error:
                    raise invalid("presets", f"{entry!r}: {error}", "correct it") from None
            chosen[model] = preset
        return chosen

    @property
    def chosen_formats(self) -> dict[str, Formats]:
        """Formats of the answers of each model in ``tool_parsers`` and ``reasoning_parsers``. Raises :class:`SettingsError`."""
        formats: dict[str, Formats] = {}
        settings: tuple[tuple[str, Sequence[str], Collection[str]], ...] = (
            ("tool_parsers", self.tool_parsers, FAMILIES),
            ("reasoning_parsers", self.reasoning_parsers, THINKING),
        )
        for setting, entries, known in settings:
            field = setting.removesuffix("s")
            for entry, model, name in _of_models(setting, entries, "FORMAT"):
                if name != NO_FORMAT and name not in known:
                    choices = ", ".join([*known, NO_FORMAT])
                    raise invalid(setting, f"{entry!r} names no format", f"write one of {choices}")
                formats[model] = msgspec.structs.replace(formats.get(model, Formats()), **{field: name})
        return formats

    @property
    def chosen_aliases(self) -> dict[str, str]:
        """Model of each alias in ``aliases``. Raises :class:`SettingsError`."""
        chosen = _unique("aliases", self.aliases, "ALIAS=MODEL")
        for alias, model in chosen.items():
            if model in chosen:
                raise invalid("aliases", f"{alias!r} stands for {model!r}, which is an alias", "name the model itself")
        return chosen

    @property
    def chosen_fallbacks(self) -> dict[str, str]:
        """Fallback of each model in ``fallbacks``. Raises :class:`SettingsError`."""
        aliases, chosen = self.chosen_aliases, _unique("fallbacks", self.fallbacks, "MODEL=FALLBACK")
        for model, fallback in chosen.items():
            if model in aliases:
                raise invalid("fallbacks", f"{model!r} is an alias", f"name the model itself, {aliases[model]!r}")
            if aliases.get(fallback, fallback) == model:
                raise invalid("fallbacks", f"{model!r} cannot replace itself", "name another model")
        return chosen

    @property
    def max_bytes_in_flight(self) -> int:
        """Most bytes of the bodies of all requests in progress."""
        return 8 * self.max_body_bytes

    @property
    def max_uploads(self) -> int:
        """Most requests whose body is still arriving."""
        return 2 * self.max_in_flight

    @property
    def max_waiting(self) -> int:
        """Most requests that wait for a text worker, and most that wait for a ready engine."""
        return max(1, self.max_in_flight // 4)

    @property
    def text_queue_bytes(self) -> int:
        """Most bytes of the bodies of the requests that wait for a text worker."""
        return self.max_bytes_in_flight

    @property
    def max_request_characters(self) -> int:
        """Most characters of query and items, joined, of one request to a model whose tokeniser has no safe cuts in the query."""
        return 16 * self.max_request_tokens

    @property
    def stored_response_bytes(self) -> int:
        """Longest conversation with which a response is stored, in bytes."""
        return self.stored_responses_bytes // 64


LISTS = tuple(field.name for field in msgspec.structs.fields(Settings) if field.type == tuple[str, ...])
"""Settings with several entries, separated by commas in the environment."""


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
            alike = " or ".join(PREFIX + field.upper() for field in get_close_matches(name, known))
            raise SettingsError(f"{variable}: there is no such setting; unset it{alike and f', or use {alike}'}")
        given[name] = [part.strip() for part in text.split(",") if part.strip()] if name in LISTS else text
    given |= {name: value for name, value in flags.items() if value is not None}
    types = get_type_hints(Settings, include_extras=True)
    return Settings(**{"engines": ()} | {name: _convert(name, value, types[name]) for name, value in given.items()})


def _convert(name: str, value: object, kind: object) -> Any:
    """Convert ``value``, which may be text, to the type of the setting ``name``."""
    try:
        return msgspec.convert(value, kind, strict=False, dec_hook=lambda to, text: to(text))
    except msgspec.ValidationError as error:
        raise invalid(name, f"{value!r} does not fit", str(error)[:1].lower() + str(error)[1:]) from None


# --- checks of single settings

_IMAGE_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?")
REDIS_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")


def check_engine(entry: str) -> None:
    """Check an entry of ``engines``. Raises :class:`SettingsError`."""
    try:
        parse_address(entry)
    except ValueError as error:
        raise invalid("engines", f"{entry!r} is not a URL of an engine", str(error)) from None


def check_origin(origin: str) -> None:
    """Check an origin as browsers send it (RFC 6454 7.1), or ``*``. Raises :class:`SettingsError`."""
    parts = urlsplit(origin)
    known = parts.scheme in ("http", "https") and parts.hostname and origin == f"{parts.scheme}://{parts.netloc}"
    if origin != "*" and (not known or "*" in origin):
        raise invalid("cors_origins", f"{origin!r} is not an origin", "write it like https://app.example:8443, or *")


def check_image_hosts(entries: Iterable[str]) -> None:
    """Check the entries of ``image_hosts``. Raises :class:`SettingsError`."""
    for entry in entries:
        if not _IMAGE_HOST.fullmatch(entry):
            remedy = "write it like images.example.com or images.example.com:8443"
            raise invalid("image_hosts", f"{entry!r} is not a host", remedy)


def check_redis_url(url: str) -> None:
    """Check a Redis URL. Raises :class:`SettingsError`, whose message does not contain the URL, which may hold a password."""
    likeness = "write it like redis://HOST:6379/0, rediss://USER@HOST or redis+cluster://HOST"
    try:
        parts = urlsplit(url)
        known = parts.scheme in REDIS_SCHEMES and parts.hostname and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:  # an invalid port
        known = False
    if not known:
        raise invalid("redis_url", "it is not a URL of Redis", likeness)
    database = parts.path.strip("/")
    if database and (parts.scheme.endswith("+cluster") or not database.isascii() or not database.isdigit()):
        raise invalid("redis_url", f"{database!r} is not a database here", f"{likeness}; clusters have only one")


def check_tracing_endpoint(endpoint: str) -> None:
    """Check the URL of a collector. Raises :class:`SettingsError`, whose message does not contain the URL."""
    try:
        check_endpoint(endpoint)
    except TracingError as error:
        raise invalid("tracing_endpoint", "it is not the URL of a collector", str(error)) from None


# --- settings with an entry NAME=VALUE for each model


def _of_models(setting: str, entries: Sequence[str], kind: str) -> Iterator[tuple[str, str, str]]:
    """Yield each entry ``MODEL=NAME`` with its model, which may contain ``=``, and its name."""
    for entry in entries:
        model, _, name = entry.rpartition("=")
        if not model or not name:
            raise invalid(setting, f"{entry!r} names no model and {kind.lower()}", f"write MODEL={kind}")
        yield entry, model, name


def _unique(setting: str, entries: Sequence[str], form: str) -> dict[str, str]:
    """Return the entries ``NAME=VALUE``, of which no two have the same name."""
    pairs: dict[str, str] = {}
    for entry in entries:
        key, _, value = (part.strip() for part in entry.partition("="))
        if not key or not value:
            raise invalid(setting, f"{entry!r} does not name both", f"write {form}")
        if key in pairs:
            raise invalid(setting, f"{key!r} has two entries", "keep one of them")
        pairs[key] = value
    return pairs


# --- entries of `engines`

_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_SERVICE = re.compile(rf"(?:(?P<namespace>{_LABEL})/)?(?P<service>{_LABEL}):(?P<port>{_LABEL})")


class StaticAddress(msgspec.Struct, frozen=True):
    """``http://host:port`` or ``https://host:port``: one engine."""

    url: str


class DnsAddress(msgspec.Struct, frozen=True):
    """``dns://name:port``: an engine at every address of a name, such as that of a headless Service."""

    host: str
    port: int


class ServiceAddress(msgspec.Struct, frozen=True):
    """``kubernetes://service:port`` or ``kubernetes://namespace/service:port``: an engine at every endpoint of a Service."""

    service: str
    port: int | str
    """Port number, or the port name in the Service."""
    namespace: str | None = None
    """None means the namespace of this gateway."""


Address = StaticAddress | DnsAddress | ServiceAddress


def parse_address(text: str) -> Address:
    """Parse an entry. Raises :class:`ValueError` with an example of a valid entry."""
    scheme, _, rest = text.partition("://")
    if scheme == "kubernetes":
        match = _SERVICE.fullmatch(rest)
        if match is None:
            raise ValueError("write it like kubernetes://engines:http or kubernetes://models/engines:8100")
        port = match["port"]
        if port.isdecimal() and not 1 <= int(port) <= 65535:
            raise ValueError("a port is a name, or a number from 1 to 65535")
        return ServiceAddress(match["service"], int(port) if port.isdecimal() else port, match["namespace"])
    if scheme not in ("http", "https", "dns"):
        raise ValueError("write it like http://127.0.0.1:8100, dns://engines.default.svc:8100 or kubernetes://engines:http")
    parts = urlsplit(text)
    try:
        host, number = parts.hostname, parts.port
    except ValueError:  # the port is no number
        host, number = None, None
    if scheme == "dns":
        if not host or not number or parts.path:
            raise ValueError("write it like dns://engines.default.svc:8100")
        return DnsAddress(host, number)
    if not host:
        raise ValueError("write it like http://127.0.0.1:8100")
    return StaticAddress(text.rstrip("/"))
