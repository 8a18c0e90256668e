"""The gateway's settings: frozen, strict, and parsed once from the environment and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from gateway.configuration.checks import (
    PREFIX,
    SettingsError,
    check_engine,
    check_image_hosts,
    check_origin,
    check_redis_url,
    check_tracing_endpoint,
    invalid,
    is_loopback,
)
from gateway.configuration.models import read_aliases, read_fallbacks, read_formats, read_presets
from gateway.logs.access import Format
from gateway.tools.formats import Formats

__all__ = ["PREFIX", "CacheIsolation", "Settings", "SettingsError", "is_loopback"]

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
    api_keys_stale_seconds: NotNegative = 300.0
    """Time for which the keys of the last valid version stay valid while their file cannot be read or is not valid; after that,
    requests that need a key are answered 503. A file that is deleted or empty revokes all keys within three seconds."""
    cache_isolation: CacheIsolation = "key"
    """Sharing of cached results and prefixes. "key": keys share only within a ``group`` that the key file gives them. "none": all
    keys share, for a server of one organisation. ``cache_salt`` in a request separates further."""
    max_body_bytes: Positive = 32 << 20
    """Largest request body, in bytes."""
    max_in_flight: Positive = 1024
    """Most requests in progress, other than operational ones, whose body is complete; more are answered 429. With keys, one key
    gets at most four times the room that the others leave free."""
    max_uploads: Positive = 2048
    """Most requests, other than operational ones, whose body is still arriving; more are answered 429. Shared between keys like
    ``max_in_flight``."""
    max_bytes_in_flight: Positive = 256 << 20
    """Most bytes of the bodies of all requests in progress, inflated; requests beyond it are answered 429. Shared between keys like
    ``max_in_flight``. At least ``max_body_bytes``."""
    max_connections: Positive = 4096
    """Most open connections. A new one beyond this number replaces the connection that has been idle longest; if none is idle, the
    new one is answered 429."""
    max_header_bytes: Annotated[int, msgspec.Meta(ge=1024, le=1 << 20)] = 64 << 10
    """Largest request line and headers together, in bytes; larger ones are answered 431."""
    max_headers: Positive = 128
    """Most headers of a request; more are answered 431."""
    header_seconds: Seconds = 10.0
    """Longest time for the request line and headers, from their first byte, before the answer is 408. On a new connection, also
    the longest time for the first byte, before the connection is closed."""
    idle_seconds: Seconds = 75.0
    """Time after which an idle connection is closed. It should be longer than the idle time of clients and proxies, so that they
    do not reuse a connection that is being closed."""
    body_seconds: Seconds = 30.0
    """Time for a body, in addition to the time for its bytes at ``body_bytes_per_second``; after that the answer is 408."""
    body_bytes_per_second: Positive = 16 << 10
    """Lowest average rate of a body, apart from the first ``body_seconds``."""
    write_seconds: Seconds = 30.0
    """Time in which a client must read some pending output; after that its connection is closed and its work is cancelled."""
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
    cache_entries: Count = 100_000
    """Most results in the in-memory cache; 0 switches it off."""
    cache_bytes: Count = 64 << 20
    """Most memory of the in-memory cache, in bytes."""
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
    cache_ttl_seconds: Seconds = 86_400.0
    """Time for which Redis keeps a result, varied by up to a tenth."""
    probe_seconds: Seconds = 1.0
    """Interval between two readiness probes of an engine."""
    connect_seconds: Seconds = 2.0
    """Longest wait for a connection to an engine."""
    engine_seconds: Seconds = 600.0
    """Longest silence of an engine within a request before the engine counts as lost."""
    silence_seconds: Seconds = 2.0
    """Time for which an engine may leave a probe unanswered before it counts as silent. The requests of a silent engine go to other
    engines, and it gets no new ones until it answers. With ``probe_seconds`` this bounds the gap in a stream whose engine stops.
    Time in which the gateway itself is blocked does not count."""
    startup_seconds: NotNegative = 60.0
    """Time after the start in which a request for an unknown model is answered 503 and not 404 while some entry of ``engines`` has
    not led to a model yet. A loading engine names its model; requests for that model are answered 503 in any case."""
    keepalive_seconds: Seconds = 15.0
    """Time without an event after which a stream gets a comment, so that proxies do not close it (many do after 60 s). A stream
    begins with status 200 if its first event takes longer than this; an error before that has its own status."""
    engine_token_file: Path | None = None
    """File whose first line is the token that authenticates the gateway to engines (``Authorization: Bearer``); read again when it
    changes. None: no token is sent."""
    resolve_seconds: Seconds = 5.0
    """Interval between two lookups of the names in ``dns://`` entries."""
    wait_seconds: NotNegative = 10.0
    """Longest time that a request waits for a ready engine of its model, before the answer is 503. 0: requests do not wait."""
    max_waiting: Count = 256
    """Most requests that wait for a ready engine; more are answered 503 at once."""
    eject_failures: Positive = 3
    """Failures in a row, or races for a late score lost, after which an engine is ejected (at most half of a model's engines)."""
    eject_seconds: Seconds = 5.0
    """Length of the first ejection. Then the engine gets one request, and each failure doubles the time, up to a minute."""
    split_tokens: Positive = 4096
    """Least work of a sub-batch, in tokens: smaller score requests go to one engine as a whole."""
    idle_split_tokens: Positive | None = None
    """Least work of a sub-batch for an engine that computes nothing else, in tokens. None: ``split_tokens``."""
    hedge_budget: Annotated[float, msgspec.Meta(ge=0, le=0.1)] = 0.02
    """Extra work for sending late scores to a second engine, as a share of the tokens that engines compute. 0: none are sent."""

    access_log: Format = "text"
    """Format of the access log on stderr, which has a line for each request: ``text``, ``json`` or ``off``."""
    access_log_probes: bool = False
    """Whether to log requests to ``/livez``, ``/readyz``, ``/health``, ``/ping`` and ``/metrics``."""
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
    max_request_characters: Positive = 16 << 20
    """Most characters of query and items, joined, of one request to a model whose tokeniser has no safe cuts in the query."""
    max_scores: Positive = 1 << 20
    """Most scores of one request: its items times its labels."""
    max_image_pixels: Positive = 1 << 25
    """Most pixels of all images of one request, as the headers of their files give them."""
    max_image_tokens: Positive = 1 << 14
    """Most tokens of all images of one request together; an image that occurs again counts once."""
    image_hosts: tuple[str, ...] = ()
    """Hosts that images may be fetched from, separated by commas in the environment: ``HOST``, at the default ports of http and
    https, or ``HOST:PORT``. Empty: only data URLs are accepted."""
    image_seconds: Seconds = 5.0
    """Longest time of fetching an image, before the answer is 400."""
    image_bytes: Positive = 10 << 20
    """Most bytes of an image that is fetched."""
    text_workers: Count = 0
    """Processes that read texts, chat templates and long bodies; at most half of them read long ones. 0 starts one for each
    processor, but at least two and at most four."""
    text_seconds: Seconds = 10.0
    """Longest time that one of these processes may work on a request, before the answer is 400."""
    template_seconds: Seconds = 2.0
    """Longest time that a model's chat template may take with a request's messages, before the answer is 400."""
    text_job_mib: Positive = 512
    """Most memory for reading one request, in MiB, before the answer is 400."""
    text_queue: Positive = 256
    """Most requests that wait to be read; more are answered 429."""
    text_queue_bytes: Positive = 256 << 20
    """Most bytes of the bodies of those requests; more are answered 429."""
    short_texts: bool = True
    """Whether short chats, responses, completions and scores, and short requests through presets, are read on the event loop.
    False: these processes read all texts."""
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
    stored_responses: Count = 10_000
    """Most responses that are kept for clients that ask for it (``store`` of ``/v1/responses``), in Redis if it is configured.
    Beyond it, the oldest of the API key with most responses are removed. 0: none are stored."""
    stored_responses_bytes: Positive = 256 << 20
    """Most bytes of these responses together."""
    stored_response_bytes: Positive = 4 << 20
    """Longest conversation with which a response is stored, in bytes; for a longer one the answer is 400."""
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
    tracing_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Part of the requests without a trace context that is traced; the sender of a context decides itself. None:
    ``OTEL_TRACES_SAMPLER``, or all."""
    tracing_service: str | None = None
    """Name of the gateway in traces. None: ``OTEL_SERVICE_NAME``, or ``yardstick-gateway``."""
    console: bool = True
    """Whether to serve the web console at ``/``."""
    parse_special_tokens_in_messages: bool = False
    """Whether text such as ``<|im_end|>`` in chat messages becomes a control token if the request does not say."""

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
        if self.max_bytes_in_flight < self.max_body_bytes:
            problem = f"{self.max_bytes_in_flight} bytes are less than one body of {self.max_body_bytes}"
            raise invalid("max_bytes_in_flight", problem, f"make it larger, or {PREFIX}MAX_BODY_BYTES smaller")
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
        return read_presets(self.presets)

    @property
    def chosen_formats(self) -> dict[str, Formats]:
        """Formats of the answers of each model in ``tool_parsers`` and ``reasoning_parsers``. Raises :class:`SettingsError`."""
        return read_formats(self.tool_parsers, self.reasoning_parsers)

    @property
    def chosen_aliases(self) -> dict[str, str]:
        """Model of each alias in ``aliases``. Raises :class:`SettingsError`."""
        return read_aliases(self.aliases)

    @property
    def chosen_fallbacks(self) -> dict[str, str]:
        """Fallback of each model in ``fallbacks``. Raises :class:`SettingsError`."""
        return read_fallbacks(self.fallbacks, self.chosen_aliases)
