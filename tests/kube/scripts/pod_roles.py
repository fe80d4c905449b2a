# SPDX-License-Identifier: Apache-2.0
"""A job with parameter servers but without TensorFlow: everybody asks all servers who they are.

Servers answer with the name of their pod. The others write each answer down, until they are asked
to finish.
"""

import json
import os
import socket
import socketserver
import threading
from pathlib import Path

FOLDER = Path(os.environ["STEPS_FOLDER"])
POD = os.environ["STEPS_NODE"]
CONFIG = json.loads(os.environ["TF_CONFIG"])
ROLE, INDEX = CONFIG["task"]["type"], CONFIG["task"]["index"]
LIMIT_S = 5.0
PAUSE = threading.Event()


class Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(POD.encode())


def ask(address: str) -> str:
    """Which pod serves there; empty if nobody answers."""
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), LIMIT_S) as connection:
            return connection.recv(1000).decode()
    except OSError:
        return ""


def main() -> None:
    if ROLE == "ps":
        port = int(CONFIG["cluster"]["ps"][INDEX].rsplit(":", 1)[1])
        socketserver.ThreadingTCPServer(("", port), Answer).serve_forever()
    while not (FOLDER / "finish").exists():
        with (FOLDER / "answers").open("a") as answers:
            for address in CONFIG["cluster"]["ps"]:
                if server := ask(address):
                    print(ROLE, INDEX, server, file=answers)
        PAUSE.wait(0.2)


main()
