"""A server that costs next to nothing, so that what is measured is the client. ``python -m tests.loadgen.stub ITEMS``

It prints its port, and answers every request at once with one score list an item.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop


class Stub(asyncio.Protocol):
    answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.waiting = b""

    def data_received(self, data: bytes) -> None:
        self.waiting += data
        head, found, body = self.waiting.partition(b"\r\n\r\n")
        if found:
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            if len(body) >= length:
                self.waiting = body[length:]
                self.transport.write(self.answer)


async def main(items: int) -> None:
    body = json.dumps({"scores": [[0.25, 0.75]] * items, "usage": {"prompt_tokens": 300 * items, "total_tokens": 300 * items}})
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    Stub.answer = (head + body).encode()
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
