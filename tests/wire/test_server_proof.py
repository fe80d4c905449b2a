# SPDX-License-Identifier: Apache-2.0
"""An agent believes a server only when that has proved the job's token."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from holdfast.model.errors import AuthError
from holdfast.protocol import codec
from holdfast.protocol import messages as m
from holdfast.runtime.transport import Link, connect

TOKEN = b"the token of the job"
LIMIT_S = 60.0

MacOf = Callable[[bytes, m.Proof], bytes]


class Silent:
    """Keeps no word, and must hear none."""

    def opened(self, link: Link) -> None: ...

    def received(self, link: Link, frame: m.Frame) -> None:
        raise AssertionError(f"{frame.body} of a server that proved nothing was heard")

    def closed(self, link: Link) -> None: ...


async def read_frame(reader: asyncio.StreamReader) -> m.AnyMessage:
    decoder = codec.FrameReader()
    while True:
        data = await reader.read(4096)
        assert data, "the agent hung up"
        for frame in decoder.feed(data):
            return frame.body


def pretender(mac_of: MacOf) -> Callable[..., Awaitable[None]]:
    """A server that has seen everything but the token. It goes on as if it were the master."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = bytes(codec.NONCE_BYTES)
        writer.write(codec.encode(m.Challenge(m.VERSION, nonce)))
        proof = await read_frame(reader)
        assert isinstance(proof, m.Proof)
        writer.write(codec.encode(m.Welcome(mac_of(nonce, proof))))
        writer.write(codec.encode(m.Done()))
        await reader.read()
        writer.close()

    return serve


async def join(mac_of: MacOf) -> None:
    server = await asyncio.start_server(pretender(mac_of), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        link = await connect(f"127.0.0.1:{port}", Silent(), TOKEN, timeout_s=LIMIT_S)
        link.abort()
    finally:
        server.close()


LIES: dict[str, MacOf] = {
    "nothing": lambda nonce, proof: b"",
    "anything": lambda nonce, proof: bytes(len(proof.mac)),
    "the agent's own proof": lambda nonce, proof: proof.mac,
    "another token": lambda nonce, proof: codec.server_mac(b"another", nonce, proof.nonce),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_agent_does_not_believe_a_server_without_the_token(lie: str) -> None:
    with pytest.raises(AuthError, match="does not hold the token"):
        asyncio.run(join(LIES[lie]))


def test_it_believes_one_that_has_it() -> None:
    asyncio.run(join(lambda nonce, proof: codec.server_mac(TOKEN, nonce, proof.nonce)))
