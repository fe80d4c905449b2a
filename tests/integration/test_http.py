# SPDX-License-Identifier: Apache-2.0
"""The master's HTTP side as a browser, a script and Prometheus meet it."""

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.master.http import http_key, serve
from holdfast.master.metrics import Metrics
from holdfast.master.view import CheckpointsView, JobView, SavingView
from holdfast.model.errors import StateError, UsageError
from holdfast.runtime.http import HEADER_BYTES_MAX
from tests.integration.live_master import Home, Master, recovered_once, running_master

TOKEN = b"0123456789abcdef"
DEADLINE_S = 120.0
STEP = "holdfast_checkpoint_step"


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """One master for all tests that only ask."""
    with running_master(Home(tmp_path_factory.mktemp("http"))) as running:
        yield running


def get(url: str, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.get(url, headers=headers, timeout=DEADLINE_S)


def bearer(token: bytes) -> dict[str, str]:
    return {"Authorization": f"Bearer {http_key(token)}"}


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Every sample of a /metrics page by its name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_health_needs_no_key(master: Master) -> None:
    answer = get(f"{master.http}/healthz")
    assert (answer.status_code, answer.json()) == (200, {"ok": True})


def test_the_index_lists_every_route(master: Master) -> None:
    answer = get(f"{master.http}/")
    assert answer.headers["content-type"].startswith("text/plain")
    assert all(
        path in answer.text for path in ("/healthz", "/metrics", "/api/v1/job", "/api/v1/history/")
    )


@pytest.mark.parametrize(
    "shown",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic dDp0"},
        {"Authorization": b"Bearer \xff\x80"},
    ],
)
def test_the_api_is_closed_without_the_key(master: Master, shown: dict[str, str]) -> None:
    for path in ("/api/v1/job", "/api/v1/history/node/0", "/api/v1/nothing", "/api/"):
        answer = get(f"{master.http}{path}", headers=shown)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "Authorization: Bearer KEY" in answer.json()["error"]


def test_the_token_itself_opens_nothing(master: Master) -> None:
    shown = {"Authorization": f"Bearer {master.token.decode()}"}
    assert get(f"{master.http}/api/v1/job", headers=shown).status_code == 401


def test_the_job_as_json(master: Master) -> None:
    answer = get(f"{master.http}/api/v1/job", headers=bearer(master.token))
    assert answer.status_code == 200
    job = answer.json()
    assert (job["job"], job["state"], job["nodes"]) == ("t", "running", [])
    assert job["world"]["state"] == "waiting for nodes"


def test_the_job_says_the_time_of_day_of_now_and_of_its_start(master: Master) -> None:
    before = time.time()
    answer = get(f"{master.http}/api/v1/job", headers=bearer(master.token))
    job = msgspec.json.decode(answer.content, type=JobView)
    # The times are rounded to milliseconds.
    assert before - 1.0 < job.wall_s < time.time() + 1.0
    assert job.wall_s - job.started_wall_s == pytest.approx(job.time_s, abs=0.01)
    assert not job.from_journal


def test_an_unknown_path_and_a_wrong_method_are_explained(master: Master) -> None:
    missing = get(f"{master.http}/nothing/here")
    assert missing.status_code == 404
    assert "/nothing/here" in missing.json()["error"]
    posted = httpx.post(f"{master.http}/healthz", content=b"x" * 100_000, timeout=DEADLINE_S)
    assert posted.status_code == 405
    assert "only GET" in posted.json()["error"]


def test_metrics_before_any_node_came(master: Master) -> None:
    answer = get(f"{master.http}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = samples(answer.text)
    assert found["holdfast_job_state", "running"] == 1
    assert found["holdfast_job_state", "failed"] == 0
    assert found["holdfast_nodes", "running"] == 0
    assert found["holdfast_generation",] == 1
    assert found["process_resident_memory_bytes",] > 0
    # Before the first step there is no goodput: 0 would be as wrong as 1.
    assert found["holdfast_step",] == -1
    assert ("holdfast_goodput_ratio",) not in found


@pytest.mark.parametrize("is_known", [True, False])
def test_metrics_say_none_of_a_tier_only_where_that_is_known(is_known: bool) -> None:
    """A master that was just restarted has not heard yet what its nodes hold."""
    directory = CheckpointsView("/ckpt", committed=5, safe_confirmed=is_known)
    job = JobView(
        "t", "running", saving=SavingView(memory_confirmed=is_known), checkpoints=(directory,)
    )
    found = samples(Metrics(lambda: msgspec.to_builtins(job)).text().decode())
    steps = {labels[0]: step for (name, *labels), step in found.items() if name == STEP}
    assert steps == ({"memory": -1, "peers": -1, "storage": 5} if is_known else {"storage": 5})


def test_metrics_tell_the_recovery_and_no_names(tmp_path: Path) -> None:
    async def scrape(master: Master) -> tuple[str, JobView]:
        agent = await recovered_once(master)
        async with httpx.AsyncClient(base_url=master.http, timeout=DEADLINE_S) as client:
            metrics = await client.get("/metrics")
            job = await client.get("/api/v1/job", headers=bearer(master.token))
        agent.hang_up()
        return metrics.text, msgspec.json.decode(job.content, type=JobView)

    with running_master(Home(tmp_path), "secret-name") as master:
        text, job = asyncio.run(scrape(master))
    found = samples(text)
    assert found["holdfast_round",] == 2
    assert found["holdfast_world_size",] == 2
    assert found["holdfast_nodes", "running"] == 1
    assert found["holdfast_attached_agents",] == 1
    assert found["holdfast_step",] == 4
    assert found["holdfast_steps_total",] == 6
    assert found["holdfast_incidents_total",] == 1
    assert found["holdfast_restarts_total", "killed"] == 1
    assert found["holdfast_store_keys",] == 0
    assert 0 < found["holdfast_goodput_ratio",] <= 1
    assert found["holdfast_seconds_total", "productive"] > 0
    stages = job.progress.incidents[0].stages
    assert set(stages) == {"detect", "rendezvous", "restart", "restore"}
    assert stages == {
        labels[0]: value
        for (name, *labels), value in found.items()
        if name == "holdfast_recovery_seconds"
    }
    assert "secret-name" not in text
    assert "node-a" not in text


def test_headers_without_end_are_refused(master: Master) -> None:
    host, port = master.http.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nX-Long: " + b"x" * (2 * HEADER_BYTES_MAX))
        assert peer.recv(1024).startswith(b"HTTP/1.1 400")
    assert get(f"{master.http}/healthz").status_code == 200


def view() -> dict[str, object]:
    return {"job": "t", "state": "running"}


async def ask(address: str, request: bytes) -> bytes:
    """Send these bytes and read until the server hangs up."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), DEADLINE_S)
    finally:
        writer.close()


def test_close_frees_the_port_and_ends_open_connections() -> None:
    async def reuse() -> bytes:
        first = await serve("127.0.0.1:0", view, TOKEN)
        host, port = first.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HT")
        await asyncio.wait_for(ask(first.address, b"GET / HTTP/1.0\r\n\r\n"), DEADLINE_S)
        await asyncio.wait_for(first.close(), DEADLINE_S)
        assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
        writer.close()
        second = await serve(first.address, view, TOKEN)
        assert second.address == first.address
        answer = await ask(second.address, b"GET /healthz HTTP/1.0\r\n\r\n")
        await second.close()
        return answer

    assert asyncio.run(reuse()).endswith(b'{"ok":true}')


def test_a_busy_port_is_one_sentence() -> None:
    async def collide() -> None:
        first = await serve("127.0.0.1:0", view, TOKEN)
        try:
            await serve(first.address, view, TOKEN)
        finally:
            await first.close()

    with pytest.raises(StateError, match=r"^cannot listen on 127\.0\.0\.1:\d+: "):
        asyncio.run(collide())


@pytest.mark.parametrize("address", ["", "8080", ":8080", "localhost", "127.0.0.1:99999", "a:b:c"])
def test_an_address_that_is_none_is_a_usage_error(address: str) -> None:
    with pytest.raises(UsageError, match="must be HOST:PORT"):
        asyncio.run(serve(address, view, TOKEN))


def test_a_master_with_a_busy_http_port_says_so_and_exits_1(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        state = str(home.folder / "state")
        ended = home.run("master", "--job", "t", "--state", state, "--http", address)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"holdfast: cannot listen on {address}: ")
    assert ended.stderr.count("\n") == 1


def test_http_can_be_off(tmp_path: Path) -> None:
    with running_master(Home(tmp_path), "t", "--http", "off") as master:
        assert master.http == "http://"
