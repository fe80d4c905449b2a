# SPDX-License-Identifier: Apache-2.0
"""Holds the job core to the conversations in the text files beside this one."""

from pathlib import Path

import pytest

from tests.scenarios.runner import Scenario

HERE = Path(__file__).parent
FILES = sorted(path.relative_to(HERE).as_posix() for path in HERE.rglob("*.txt"))


@pytest.mark.parametrize("name", FILES)
def test_scenario(name: str, pytestconfig: pytest.Config) -> None:
    path = HERE / name
    expected = path.read_text(encoding="utf-8")
    actual = Scenario(expected).run()
    if pytestconfig.getoption("rewrite_scenarios", default=False):
        path.write_text(actual, encoding="utf-8")
        return
    assert actual.splitlines() == expected.splitlines(), (
        f"{name} tells another story; if the new one is right: "
        "pytest tests/scenarios --rewrite-scenarios"
    )


def test_a_wrong_line_is_an_error_and_not_silence() -> None:
    with pytest.raises(ValueError, match="line 2: unknown input 'atach'"):
        Scenario("job max=1\natach at=1 agent=a\n").run()
    with pytest.raises(ValueError, match="line 2: unknown keys: colour"):
        Scenario("job max=1\nattach at=1 agent=a colour=red\n").run()


def test_every_row_of_the_node_state_flow_has_a_scenario() -> None:
    for row in range(13):
        assert any(name.startswith(f"nodes/row_{row:02}_") for name in FILES), row
