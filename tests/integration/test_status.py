# SPDX-License-Identifier: Apache-2.0
"""`holdfast status` against live masters, and the mistakes of its user and of a master's user."""

import asyncio
import json
import os
import signal
import socket
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.model.errors import AuthError
from holdfast.protocol import messages as m
from holdfast.runtime.transport import connect
from tests.integration.live_master import (
    START_S,
    HollowAgent,
    Home,
    Master,
    recovered_once,
    running_master,
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """One master for all tests that change nothing of its job."""
    with running_master(Home(tmp_path_factory.mktemp("status"))) as master:
        yield master


def the_sentence(stderr: str) -> str:
    """What was said, which must be exactly one line and no traceback."""
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("holdfast: "), stderr
    return stderr.removeprefix("holdfast: ").rstrip()


def test_the_text_tells_the_story(home: Home) -> None:
    async def look(master: Master) -> tuple[str, str, str, str]:
        agent = await recovered_once(master)
        text = await home.run_beside("status")
        state = await home.run_beside("status", "--job", "t", "--json")
        history = await home.run_beside("status", "--history", "node/0")
        unknown = await home.run_beside("status", "--history", "node/7")
        agent.hang_up()
        assert (text.returncode, text.stderr) == (0, "")
        assert (state.returncode, state.stderr) == (0, "")
        assert (history.returncode, history.stderr) == (0, "")
        assert unknown.returncode == 1
        return text.stdout, state.stdout, history.stdout, the_sentence(unknown.stderr)

    with running_master(home) as master:
        text, state, history, unknown = asyncio.run(look(master))
        http = master.http
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert "job t running for" in words
    assert "world round 2, generation 3, running: 1 node, 2 workers" in words
    assert "step 4 (6 finished" in words
    assert "restarts 1 killed" in words
    joined, broken = (history.index(said) for said in ("node rank 0 joined", "round 1 is over"))
    assert joined < broken
    assert unknown.startswith("this master has told nothing of 'node/7'; there is ")
    assert "node/0" in unknown
    assert "round/2" in unknown
    assert http in words
    assert "rank id workers state start cores memory steps/s beat host" in words
    assert "0 0 2 member" in words
    assert "node-a" in words
    assert "round 1: rank 1 on node rank 0 was killed by SIGKILL" in words
    incident = json.loads(state)["progress"]["incidents"][0]
    stages = ", ".join(f"{name} {seconds:.3f}" for name, seconds in incident["stages"].items())
    assert f"recovery {incident['recovery_s']:.3f} s: {stages}" in words
    assert incident["recovery_s"] == pytest.approx(sum(incident["stages"].values()), abs=0.002)


def test_follow_tells_what_happens_until_the_job_ends(home: Home) -> None:
    async def follow(master: Master) -> tuple[int | None, list[str]]:
        agent = await HollowAgent.attached(master)
        world = await agent.world()
        follower = await asyncio.create_subprocess_exec(
            *home.command("status", "--follow", "--json"),
            env=home.environment(),
            stdout=asyncio.subprocess.PIPE,
        )
        assert follower.stdout is not None
        lines = [await asyncio.wait_for(follower.stdout.readline(), START_S)]
        await agent.work(world, last_step=2)
        await agent.fail(world)
        world = await agent.world()
        await agent.work(world, last_step=4)
        await agent.finish(world)
        agent.hang_up()
        lines += (await asyncio.wait_for(follower.stdout.read(), START_S)).splitlines()
        return await follower.wait(), [line.decode() for line in lines]

    with running_master(home) as master:
        code, lines = asyncio.run(follow(master))
    assert code == 0
    assert json.loads(lines[0])["job"] == "t"
    stories = [json.loads(line) for line in lines[1:]]
    kinds = [story["kind"] for story in stories]
    assert "WorldStarted" in kinds
    assert kinds[-1] == "JobFinished"
    # What belongs together can be put together, while the incident is still open too.
    of_incident = [story["kind"] for story in stories if story.get("incident") == 1]
    assert of_incident == ["WorldBroken", "WorldFormed", "WorldStarted", "IncidentClosed"]


def ignore_ctrl_c() -> None:
    """As a script does for what it puts into the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize("before", [None, ignore_ctrl_c])
@pytest.mark.parametrize("ending", [signal.SIGINT, None])
def test_follow_ends_with_ctrl_c_or_with_the_master(
    home: Home, ending: signal.Signals | None, before: Callable[[], None] | None
) -> None:
    async def follow(master: Master) -> tuple[int | None, bytes, bytes]:
        follower = await asyncio.create_subprocess_exec(
            *home.command("status", "--follow"),
            env=home.environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=before,
        )
        assert follower.stdout is not None
        first = await asyncio.wait_for(follower.stdout.readline(), START_S)
        if ending is None:
            master.process.kill()
        else:
            follower.send_signal(ending)
        _, said = await asyncio.wait_for(follower.communicate(), START_S)
        return follower.returncode, first, said

    with running_master(home) as master:
        code, first, said = asyncio.run(follow(master))
    assert b"running" in first
    if ending is None:
        assert code == 1
        assert "the master is gone" in the_sentence(said.decode())
    else:
        assert (code, said) == (0, b"")


def test_no_job(home: Home) -> None:
    ended = home.run("status")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert the_sentence(ended.stderr) == "no job runs here"
    ended = home.run("status", "--job", "x")
    assert ended.returncode == 2
    assert the_sentence(ended.stderr) == "no job 'x' runs here"


def test_a_job_whose_master_is_gone_is_shown_from_its_journal(home: Home) -> None:
    with running_master(home) as master:
        told = home.run("status", "--json")  # It serves when its first entries are written.
        assert json.loads(told.stdout)["world"]["generation"] == 1
        master.process.kill()
        master.process.wait(START_S)
    ended = home.run("status", "--state", str(home.state("t")))
    assert ended.returncode == 0
    assert "t  not ended after" in ended.stdout
    assert "no master runs here; from its journal, as of 20" in ended.stdout
    before = sorted(path.name for path in home.state("t").iterdir())
    told = home.run("status", "--state", str(home.state("t")), "--json")
    view = json.loads(told.stdout)
    assert (view["job"], view["from_journal"], view["world"]["generation"]) == ("t", True, 1)
    assert sorted(path.name for path in home.state("t").iterdir()) == before
    follow = home.run("status", "--state", str(home.state("t")), "--follow")
    assert the_sentence(follow.stderr).startswith("no master runs on ")
    assert home.run("status").returncode == 2


def test_several_jobs_are_named(home: Home) -> None:
    with running_master(home, "one"), running_master(home, "two"):
        ended = home.run("status")
        assert ended.returncode == 2
        assert (
            the_sentence(ended.stderr) == "several jobs run here; choose one with --job: one, two"
        )
        by_name = home.run("status", "--job", "two", "--json")
        by_state = home.run("status", "--state", str(home.state("one")), "--json")
    assert json.loads(by_name.stdout)["job"] == "two"
    assert json.loads(by_state.stdout)["job"] == "one"


def test_a_master_by_its_address(home: Home, shared: Master) -> None:
    master = shared
    address = ("status", "--json", "--master", master.address)
    token_file = str(master.home.state("t") / "token")
    found = home.run(*address, "--token-file", token_file)
    from_environment = home.run(*address, HOLDFAST_TOKEN_FILE=token_file)
    without = home.run(*address)
    wrong_file = home.folder / "wrong"
    wrong_file.write_text("0" * 64)
    wrong_file.chmod(0o600)
    wrong = home.run(*address, "--token-file", str(wrong_file))
    assert json.loads(found.stdout)["job"] == "t"
    assert json.loads(from_environment.stdout)["job"] == "t"
    assert (without.returncode, wrong.returncode) == (2, 1)
    assert "--token-file" in the_sentence(without.stderr)
    said = the_sentence(wrong.stderr)
    assert said.startswith(f"cannot reach the master at {master.address}: wrong token")


def test_nobody_answers_or_somebody_else_does(home: Home) -> None:
    token = home.folder / "token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    rest = ("--token-file", str(token))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        silent = home.run("status", "--master", address, *rest, "--timeout", "0.3")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # Nobody else gets this port, and nobody listens on it.
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        refused = home.run("status", "--master", address, *rest)
    assert (silent.returncode, refused.returncode) == (1, 1)
    assert "--tls-ca" in the_sentence(silent.stderr)
    assert "refused" in the_sentence(refused.stderr)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--master", "nowhere"), "--master must be HOST:PORT"),
        (("--master", "127.0.0.1:1", "--token-file", "/missing"), "/missing does not exist"),
        (("--state", "/missing"), "/missing is not a directory"),
        (("--timeout", "0"), "seconds above 0"),
        (("--timeout", "soon"), "seconds above 0"),
        (("--job", "a", "--master", "127.0.0.1:1"), "not allowed with"),
    ],
)
def test_mistakes_exit_2(home: Home, words: tuple[str, ...], expected: str) -> None:
    ended = home.run("status", *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr


# ---- the master's own bad input ------------------------------------------------------------------


def test_a_second_master_on_one_state_is_refused(shared: Master) -> None:
    home = shared.home
    state = ("--state", str(home.state("t")))
    second = home.run("master", "--job", "t", *state)
    assert (second.returncode, second.stdout) == (1, "")
    assert str(home.state("t")) in the_sentence(second.stderr)
    assert home.run("status", *state).returncode == 0


def test_a_master_with_a_busy_port(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        state = str(home.folder / "state")
        ended = home.run("master", "--job", "t", "--state", state, "--listen", address)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert the_sentence(ended.stderr).startswith(f"cannot listen on {address}: ")


@pytest.mark.parametrize("state", ["/dev/null", "/proc/holdfast"])
def test_a_state_directory_that_cannot_be(home: Home, state: str) -> None:
    ended = home.run("master", "--job", "t", "--state", state)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert state in the_sentence(ended.stderr)


def test_an_agent_with_the_wrong_token_is_refused(shared: Master) -> None:
    async def knock(master: Master) -> None:
        await connect(master.address, HollowAgent(), b"0" * 64)

    with pytest.raises(AuthError, match="wrong token"):
        asyncio.run(knock(shared))


def test_a_request_before_attach_is_refused(shared: Master) -> None:
    async def skip_attach(master: Master) -> m.AnyMessage:
        stranger = await HollowAgent.connected(master)
        answer = await stranger.ask(m.WorkersDone(1))
        stranger.hang_up()
        return answer

    answer = asyncio.run(skip_attach(shared))
    assert isinstance(answer, m.Refused)
    assert "before the agent was attached" in answer.message


def _corrupt(journal: Path) -> None:
    journal.write_bytes(b"this was a journal" * 1000)


def _cut(journal: Path) -> None:
    os.truncate(journal, journal.stat().st_size // 2)


def _newer(journal: Path) -> None:
    with sqlite3.connect(journal) as database:
        changed = database.execute("UPDATE meta SET value = '1000' WHERE key = 'format'")
        assert changed.rowcount == 1
    database.close()


@pytest.mark.parametrize("damage", [_corrupt, _cut, _newer])
def test_a_damaged_or_newer_journal_stops_the_master(
    home: Home, damage: Callable[[Path], None]
) -> None:
    with running_master(home):
        pass
    journal = home.state("t") / "journal.db"
    damage(journal)
    before = journal.read_bytes()
    ended = home.run("master", "--job", "t", "--state", str(home.state("t")))
    assert (ended.returncode, ended.stdout) == (1, "")
    the_sentence(ended.stderr)
    assert journal.read_bytes() == before
