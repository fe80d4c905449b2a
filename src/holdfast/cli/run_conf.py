# SPDX-License-Identifier: Apache-2.0
"""The meaning of the pairs in --rdzv-conf: two of torchrun's keys have an effect here."""

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.cli.run_flags import Answer, Answers, Ignored
from holdfast.model.errors import UsageError

_WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(
        ("close_timeout", "read_timeout", "heartbeat_timeout"),
        "every wait on the master has its own limit",
    ),
    **dict.fromkeys(
        ("keep_alive_interval", "keep_alive_max_attempt"),
        "agents hold one stream to the master, whose loss is seen at once",
    ),
    **dict.fromkeys(
        ("is_host", "store_type", "use_agent_store", "rank"),
        "the master forms the world and serves the store",
    ),
    **dict.fromkeys(
        ("protocol", "cert", "key", "cacert", "ssl_cert", "ssl_cert_key", "ca_cert", "etcd_prefix"),
        "there is no etcd; --tls-ca secures the connection to the master",
    ),
    "pend_timeout": "a node that the world has no place for waits as a spare",
}
_JOIN_KEYS = ("join_timeout", "timeout")
_LAST_CALL_KEYS = ("last_call_timeout", "lastcall_timeout")
_WITH_EFFECT = _JOIN_KEYS + _LAST_CALL_KEYS


@dataclass(frozen=True, slots=True)
class RdzvConf:
    """The values of --rdzv-conf."""

    given: Mapping[str, str]
    join_timeout_s: float
    last_call_s: float


def rdzv_conf(answers: Answers) -> tuple[RdzvConf, list[Ignored]]:
    """The given values, and those without effect; UsageError for an unknown key."""
    answer = answers.get("rdzv-conf")
    given: dict[str, str] = {}
    ignored: list[Ignored] = []
    if answer is not None and answer.text.strip():
        for pair in answer.text.split(","):
            key, value = _pair(pair, answer.source)
            if key in _WITHOUT_EFFECT:
                ignored.append(Ignored(f"{answer.source} {key}", _WITHOUT_EFFECT[key]))
            given[key] = value
    conf = RdzvConf(
        given,
        join_timeout_s=_seconds(given, _JOIN_KEYS, default=600.0, zero=False),
        last_call_s=_seconds(given, _LAST_CALL_KEYS, default=30.0, zero=True),
    )
    return conf, ignored


def _pair(text: str, source: str) -> tuple[str, str]:
    key, _, value = (part.strip() for part in text.partition("="))
    if not key or not value:
        raise UsageError(f"{source} must be KEY=VALUE pairs with commas between them, not {text!r}")
    if key not in _WITH_EFFECT and key not in _WITHOUT_EFFECT:
        known = ", ".join((*_WITH_EFFECT, *_WITHOUT_EFFECT))
        raise UsageError(f"{source} has no key {key!r}: the keys are {known}")
    return key, value


def _seconds(
    conf: Mapping[str, str], keys: tuple[str, str], *, default: float, zero: bool
) -> float:
    """The value under the first key that is given: the second is an older name."""
    for key in keys:
        if key in conf:
            return Answer(conf[key], f"--rdzv-conf {key}").seconds(zero=zero)
    return default
