# SPDX-License-Identifier: Apache-2.0
"""The master's certificate over time: its end is said before it comes, and a new one is used."""

import asyncio
import hashlib
import shutil
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from holdfast.protocol import messages as m
from holdfast.runtime.observe import wall_clock
from holdfast.runtime.tls import ServedCertificate, client_tls
from holdfast.runtime.transport import Link, listen, split_address
from tests.integration.jobs import SCRIPTS, Jobs
from tests.integration.test_bad_input import self_signed

DAY_S = 86400.0
TOKEN = b"t" * 32
Look = Callable[[], Awaitable[str]]


class Nobody:
    """Takes no links."""

    def opened(self, link: Link) -> None:
        raise AssertionError("nobody has proved the token")

    def received(self, link: Link, frame: m.Frame) -> None:
        raise AssertionError("nobody has proved the token")

    def closed(self, link: Link) -> None:
        """Nothing to do."""


def shown(pem: Path) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.read_text())).hexdigest()


def serving(
    certificate: ServedCertificate,
    trusted: Path,
    use: Callable[[Callable[[], Awaitable[str]]], Awaitable[None]],
) -> None:
    """Serve with it, and give `use` a function that connects and tells what was shown."""

    async def run() -> None:
        server = await listen("127.0.0.1:0", Nobody(), TOKEN, tls=certificate.context)
        host, port = split_address(server.address)

        async def look() -> str:
            tls = client_tls(trusted)
            _, writer = await asyncio.open_connection(host, port, ssl=tls, server_hostname=host)
            seen = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.transport.abort()
            return hashlib.sha256(seen).hexdigest()

        try:
            await use(look)
        finally:
            await server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_renewed_files_are_used_and_damaged_ones_are_not(tmp_path: Path) -> None:
    old, old_key = self_signed(tmp_path, "old", days=100)
    new, new_key = self_signed(tmp_path, "new", days=100)
    both = tmp_path / "both.pem"
    both.write_text(old.read_text() + new.read_text())
    old_one, new_one = shown(old), shown(new)
    certificate = ServedCertificate(old, old_key)

    async def use(look: Look) -> None:
        assert await look() == old_one
        assert certificate.look(wall_clock()) == []
        # A person replaces one file after the other.
        shutil.copy(new, old)
        (said,) = certificate.look(wall_clock())
        assert "cannot be used" in said
        assert said.endswith("the one before it stays in use")
        assert certificate.look(wall_clock()) == [], "said once"
        assert await look() == old_one
        shutil.copy(new_key, old_key)
        assert certificate.look(wall_clock()) == [
            f"the certificate {old} has changed: it is in use now"
        ]
        assert await look() == new_one
        old.unlink()
        (said,) = certificate.look(wall_clock())
        assert "No such file" in said
        assert await look() == new_one

    serving(certificate, both, use)


@pytest.mark.parametrize(
    ("days", "words"), [(10.0, "expires on"), (-1.0, "expired on")], ids=["soon", "over"]
)
def test_the_end_is_said_once_a_day(tmp_path: Path, days: float, words: str) -> None:
    certificate = ServedCertificate(*self_signed(tmp_path, "ours", days))
    now = wall_clock()
    (said,) = certificate.look(now)
    assert words in said
    assert certificate.look(now + DAY_S / 2) == []
    assert len(certificate.look(now + DAY_S)) == 1


def test_an_end_that_is_far_is_not_said(tmp_path: Path) -> None:
    certificate = ServedCertificate(*self_signed(tmp_path, "ours", days=30))
    assert certificate.look(wall_clock()) == []
    assert len(certificate.look(wall_clock() + 20 * DAY_S)) == 1
    assert "expired" in certificate.look(wall_clock() + 31 * DAY_S)[0]


def test_an_agent_says_why_the_master_that_came_back_cannot_be_used(
    jobs: Jobs, tmp_path: Path
) -> None:
    """And goes on as soon as it can be."""
    good, good_key = self_signed(tmp_path, "good", days=100)
    late, late_key = self_signed(tmp_path, "late", days=-1)
    both = tmp_path / "both.pem"
    both.write_text(good.read_text() + late.read_text())
    secure = ("--http", "off", "--tls-cert", str(good), "--tls-key", str(good_key))
    master = jobs.master(*secure)
    words = ("--no-spares", "--tls-ca", str(both), str(SCRIPTS / "awaits.py"))
    node = jobs.node(master, "--nproc-per-node", "2", *words)
    jobs.wait_for("awaits")
    token_file = master.token_file
    master.kill()
    expired = ("--http", "off", "--tls-cert", str(late), "--tls-key", str(late_key))
    master = jobs.master(*expired, listen=master.address)
    master.wait_line(r"late.pem expired on .* agents and commands refuse it")
    node.wait_line(r"no master of this job at .*\(certificate has expired\); trying again")
    master.kill()
    other = tmp_path / "other-token"
    other.write_text("another token " * 4)
    other.chmod(0o600)
    master = jobs.master(*secure, "--token-file", str(other), listen=master.address)
    node.wait_line(r"no master of this job at .*token.*; trying again")
    assert node.count(r"certificate has expired") == 1
    master.kill()
    master = jobs.master(*secure, "--token-file", str(token_file), listen=master.address)
    master.wait_line("came back")
    jobs.finish()
    node.succeeds()
    master.succeeds()
    assert len(jobs.events("main")) == 2
