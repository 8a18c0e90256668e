"""A small reverse proxy that does what an Ingress object says, standing in for a controller where none can be had.

It takes host, paths, backend and the largest body from the object, streams both ways, and sends to the address of the Service,
which must be reachable from here. Every request has a connection of its own, so that the cluster's balancing decides where it goes.
"""

from __future__ import annotations

import asyncio
import re
import threading
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web
from kubernetes import client

from tests.cluster.chart.kube import Release, api

_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


class IngressProxy:
    """Serves on a port of this machine between entering and leaving, in a thread of its own."""

    def __init__(self, release: Release) -> None:
        self._ingress = client.NetworkingV1Api(api()).read_namespaced_ingress(release.name, release.namespace)
        service = release.core.read_namespaced_service(release.name, release.namespace).spec
        self._backend = f"http://{service.cluster_ip}:{service.ports[0].port}"
        (self._rule,) = self._ingress.spec.rules
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def host(self) -> str:
        """The expected Host header."""
        return str(self._rule.host)

    async def _start(self) -> None:
        size = re.fullmatch(r"(\d+)m", self._ingress.metadata.annotations["nginx.ingress.kubernetes.io/proxy-body-size"])
        assert size
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        application = web.Application(client_max_size=int(size[1]) << 20)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        paths = [path.path for path in self._rule.http.paths]
        if request.host != self.host or not any(_under(request.path, path) for path in paths):
            return web.Response(status=404, text="no rule of the Ingress")
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        async with self._session.request(request.method, self._backend + request.path_qs, headers=headers, data=body) as upstream:
            kept: dict[str, Any] = {name: value for name, value in upstream.headers.items() if name.lower() not in _HOP}
            answer = web.StreamResponse(status=upstream.status, headers=kept)
            await answer.prepare(request)
            async for chunk in upstream.content.iter_any():
                await answer.write(chunk)
            await answer.write_eof()
            return answer


def _under(path: str, prefix: str) -> bool:
    """Kubernetes's Prefix: element by element."""
    return path == prefix or path.startswith(prefix.rstrip("/") + "/")
