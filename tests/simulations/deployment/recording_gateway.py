# SPDX-License-Identifier: Apache-2.0
"""A gateway that records every request and reply in a folder, as an attacker in its place could.

Arguments: port, SuperLink, certificate, key, authority, folder.
"""

import itertools
import json
import sys
from pathlib import Path

import uvicorn

from simulations.deployment.gateway import create_app


def recording(app, folder):
    """The same application, with all bodies written down."""
    counter = itertools.count()

    async def recorded(scope, receive, send):
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        number, request, answer = next(counter), bytearray(), bytearray()

        async def hear():
            event = await receive()
            request.extend(event.get("body", b""))
            return event

        async def say(event):
            answer.extend(event.get("body", b""))
            await send(event)

        await app(scope, hear, say)
        name = f"{number:06d}-{scope['path'].rpartition('/')[2]}"
        headers = {key.decode(): value.decode("latin-1") for key, value in scope["headers"]}
        (folder / f"{name}.json").write_text(
            json.dumps({"path": scope["path"], "headers": headers})
        )
        (folder / f"{name}.request").write_bytes(request)
        (folder / f"{name}.answer").write_bytes(answer)

    return recorded


if __name__ == "__main__":
    port, upstream, certificate, key, authority, folder = sys.argv[1:]
    app = recording(create_app(upstream, Path(authority)), Path(folder))
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=int(port),
        ssl_certfile=certificate,
        ssl_keyfile=key,
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
