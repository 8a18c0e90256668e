"""Settings from the environment and the command line."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.settings import Settings, SettingsError, load_settings

URL = "http://127.0.0.1:1"


def test_settings_come_from_environment_and_flags() -> None:
    environment = {"YARDSTICK_ENGINES": "http://a:1, https://b", "YARDSTICK_PORT": "9", "PATH": "x", "YARDSTICK_CACHE_BYTES": "5"}
    settings = load_settings(environment, {"port": 10, "host": None})
    assert settings == Settings(engines=("http://a:1", "https://b"), port=10, cache_bytes=5)


@pytest.mark.parametrize(
    ("environment", "flags", "words"),
    [
        ({}, {}, "YARDSTICK_ENGINES (--engine): no engine is named"),
        ({"YARDSTICK_ENGINE": URL}, {}, "YARDSTICK_ENGINE: there is no such setting; unset it, or use YARDSTICK_ENGINES"),
        ({"YARDSTICK_XXYYZZ": "1"}, {}, "YARDSTICK_XXYYZZ: there is no such setting; unset it"),
        ({"YARDSTICK_PORT": "http"}, {"engines": [URL]}, "YARDSTICK_PORT (--port): 'http' does not fit; expected `int`"),
        ({"YARDSTICK_PORT": "70000"}, {"engines": [URL]}, "<= 65535"),
        ({"YARDSTICK_PROBE_SECONDS": "nan"}, {"engines": [URL]}, "YARDSTICK_PROBE_SECONDS: 'nan' does not fit"),
        ({"YARDSTICK_MAX_BODY_BYTES": "0"}, {"engines": [URL]}, ">= 1"),
        ({}, {"engines": ["127.0.0.1:8100"]}, "is not a URL of an engine"),
        (
            {},
            {"engines": [URL], "redis_url": "http://a"},
            "YARDSTICK_REDIS_URL (--redis-url): it is not a URL of Redis; write it like",
        ),
        ({}, {"engines": [URL], "redis_url": "redis://:secret@a:x/0"}, "it is not a URL of Redis"),
        ({}, {"engines": [URL], "redis_url": "redis://a/b"}, "'b' is not a database"),
        ({}, {"engines": [URL], "redis_url": "redis+cluster://a/1"}, "clusters have only one"),
        ({}, {"engines": [URL], "redis_ca_file": "/no/such"}, "YARDSTICK_REDIS_CA_FILE: there is no file '/no/such'"),
        ({"YARDSTICK_REDIS_PREFIX": "a b"}, {"engines": [URL]}, "YARDSTICK_REDIS_PREFIX: 'a b' does not fit"),
        ({}, {"engines": [URL], "host": "0.0.0.0"}, "no API keys are set; name a file of keys"),
        ({}, {"engines": [URL], "host": "::"}, "no API keys are set"),
        ({}, {"engines": [URL], "host": "example.org"}, "no API keys are set"),
    ],
)
def test_bad_settings_name_the_key_and_the_remedy(environment: dict[str, str], flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(environment, flags)
    assert words in str(error.value)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_loopback_needs_no_keys() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert Settings(engines=(URL,), host=host).host == host
