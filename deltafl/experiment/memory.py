"""What clients remember between rounds, on disk: memory stays bounded with many clients.

Every round writes a version of its own, and a version is deleted only when a checkpoint no longer
needs it, so a run that is resumed sees exactly what the checkpoint's round saw.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path

from deltafl.errors import UserError

VERSION = re.compile(r"([0-9]{1,13})-([0-9]{1,13})\.safetensors")


def is_version(name: object) -> bool:
    """Say whether this is the name of a file of a client's memory, and so of nothing elsewhere."""
    return isinstance(name, str) and VERSION.fullmatch(name) is not None


class ClientMemory:
    """The files of all clients' memories; `client-round.safetensors` is what round left behind."""

    def __init__(self, folder: Path, after_round: int) -> None:
        """Open the memories as they were after a round; later versions never happened."""
        self._folder = folder
        self._versions: dict[int, list[int]] = defaultdict(list)
        if folder.is_symlink():  # what lies elsewhere is not ours to tidy up
            raise UserError(f"{folder} is a link: delete it, and start the run again")
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir()):
            match = VERSION.fullmatch(path.name)
            if match and int(match[2]) <= after_round and path.is_file():
                self._versions[int(match[1])].append(int(match[2]))
            else:
                path.unlink()
        for versions in self._versions.values():
            versions.sort()

    def recall(self, client: int, round_: int) -> Path | None:
        """Return where the client's memory from before a round lies, if it has any."""
        versions = self._versions.get(client, [])
        place = bisect_right(versions, round_ - 1)
        return self._path(client, versions[place - 1]) if place else None

    def remember(self, client: int, round_: int) -> Path:
        """Return where the client's memory of a round goes."""
        return self._path(client, round_)

    def kept(self, client: int, round_: int) -> None:
        """Note that the client's memory of a round has been written."""
        self._versions[client].append(round_)

    def newest(self) -> list[str]:
        """Return the names of the files that hold what clients remember now."""
        return [self._path(c, versions[-1]).name for c, versions in self._versions.items()]

    def forget(self, before_round: int) -> None:
        """Delete every version that a later one, up to a checkpoint's round, replaces."""
        for client, versions in self._versions.items():
            newest = bisect_right(versions, before_round) - 1
            for version in versions[: max(newest, 0)]:
                self._path(client, version).unlink(missing_ok=True)
            del versions[: max(newest, 0)]

    def _path(self, client: int, round_: int) -> Path:
        return self._folder / f"{client}-{round_}.safetensors"
