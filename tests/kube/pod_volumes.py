# SPDX-License-Identifier: Apache-2.0
"""The volumes of the fake kubelet's pods: folders, filled with what the API server has."""

import base64
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.platforms.kubernetes.api import CONFIG_MAPS, SECRETS, SERVICE_ACCOUNTS, Api, Kind

MODE = 0o644
MEMORY = os.environ.get("HOLDFAST_MEMORY_DIR", "/dev/shm")
"""Goes with the test run, and with it the volumes that are in memory."""


class Volumes:
    """Makes the folders; `folder` is for what outlives a pod, which claims do."""

    def __init__(self, api: Api, namespace: str, folder: Path, authority: Path) -> None:
        self._api = api
        self._namespace = namespace
        self._folder = folder
        self._authority = authority

    async def make(self, pod: Mapping[str, Any], folder: Path) -> dict[str, Path]:
        """All volumes of a pod, by name; `folder` is the pod's."""
        made = {}
        for volume in pod["spec"].get("volumes", ()):
            path = folder / "volumes" / volume["name"]
            path.mkdir(parents=True, exist_ok=True)
            made[volume["name"]] = await self._fill(volume, path)
            if "hostPath" not in volume:
                share(made[volume["name"]], pod["spec"].get("securityContext", {}).get("fsGroup"))
        return made

    async def _fill(self, volume: Mapping[str, Any], path: Path) -> Path:
        if "secret" in volume:
            source = volume["secret"]
            await self._write(SECRETS, source["secretName"], source, path)
        elif "configMap" in volume:
            source = volume["configMap"]
            await self._write(CONFIG_MAPS, source["name"], source, path)
        elif "hostPath" in volume:
            path = Path(volume["hostPath"]["path"])
            path.mkdir(parents=True, exist_ok=True)
        elif "persistentVolumeClaim" in volume:
            path = self._folder / "claims" / volume["persistentVolumeClaim"]["claimName"]
            path.mkdir(parents=True, exist_ok=True)
        elif "emptyDir" not in volume:
            raise ValueError(f"the fake kubelet cannot make the volume {volume}")
        elif volume["emptyDir"].get("medium") == "Memory":
            path = Path(tempfile.mkdtemp(dir=MEMORY))
        return path

    async def _write(self, kind: Kind, name: str, source: Mapping[str, Any], path: Path) -> None:
        contents = await self.contents(kind, name)
        chosen = source.get("items") or [{"key": key, "path": key} for key in contents]
        for item in chosen:
            file = path / item["path"]
            file.write_bytes(contents[item["key"]])
            file.chmod(item.get("mode", source.get("defaultMode", MODE)))

    async def contents(self, kind: Kind, name: str) -> dict[str, bytes]:
        """What is in a Secret or a ConfigMap."""
        found = await self._api.get(kind, name, self._namespace)
        data = found.get("data", {})
        if kind == SECRETS:
            return {key: base64.b64decode(value) for key, value in data.items()}
        return {key: value.encode() for key, value in data.items()}

    async def account(self, pod: Mapping[str, Any], folder: Path) -> Path | None:
        """The folder with the token of the pod's ServiceAccount, if it shall have one."""
        name = pod["spec"].get("serviceAccountName", "")
        if not name or pod["spec"].get("automountServiceAccountToken") is False:
            return None
        reference = {"kind": "Pod", "apiVersion": "v1", "name": pod["metadata"]["name"]}
        reference["uid"] = pod["metadata"]["uid"]
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"boundObjectRef": reference},
        }
        kind = Kind("", "v1", f"{SERVICE_ACCOUNTS.plural}/{name}/token")
        token = (await self._api.create(kind, asked, self._namespace))["status"]["token"]
        path = folder / "account"
        path.mkdir(exist_ok=True)
        (path / "token").write_text(token)
        (path / "ca.crt").write_bytes(self._authority.read_bytes())
        (path / "namespace").write_text(self._namespace)
        return path


def share(folder: Path, group: int | None) -> None:
    """What fsGroup does: the group may read and write what is there, and what will be."""
    if group is None:
        folder.chmod(0o777)
        return
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, -1, group)
        path.chmod(path.stat().st_mode | (0o2070 if path.is_dir() else 0o040))
