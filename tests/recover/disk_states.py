"""What a disk may hold after a power loss: folders made from the events of a recording (tests/recover/disk_record.py).

    disk = Disk()
    for event in events[:n]: disk.do(event)
    disk.write(folder, Loss(random.Random(3)))

A file's bytes and a folder's names are on disk once each was fsynced. Of what came after, anything may be there: none
of it, all of it, some of it, in any order; bytes that are missing may be zeros, and names may come before bytes.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.recover.disk_record import Event


@dataclass
class File:
    """`written`: its contents since the last fsync, the first of them on disk (None: nothing is)."""

    written: list[bytes | None] = field(default_factory=lambda: [None, b""])

    @property
    def content(self) -> bytes:
        return self.written[-1] or b""


@dataclass
class Folder:
    """`names`: as programs see it; `synced`: as it is on disk; `pending`: changes since, each a set of new entries
    (None: the name goes)."""

    names: "dict[str, File | Folder]" = field(default_factory=dict)
    synced: "dict[str, File | Folder]" = field(default_factory=dict)
    pending: "list[dict[str, File | Folder | None]]" = field(default_factory=list)

    def change(self, entries: "dict[str, File | Folder | None]") -> None:
        self.pending.append(entries)
        _apply(self.names, entries)


def _apply(names: "dict[str, File | Folder]", entries: "dict[str, File | Folder | None]") -> None:
    for name, one in entries.items():
        if one is None:
            names.pop(name, None)
        else:
            names[name] = one


class Loss:
    """What of the unsynced is lost. `how`: least (all of it), most (none), or drawn."""

    def __init__(self, how: str, draw: random.Random) -> None:
        self.how, self._draw = how, draw
        self._contents: dict[int, bytes] = {}  # a file may have two names

    def entries(self, folder: Folder) -> "dict[str, File | Folder]":
        found = dict(folder.synced)
        for entries in folder.pending:
            if self.how == "most" or (self.how == "drawn" and self._draw.random() < 0.5):
                _apply(found, entries)
        return found

    def content(self, file: File) -> bytes:
        return self._contents.setdefault(id(file), self._content(file))

    def _content(self, file: File) -> bytes:
        synced, latest = file.written[0], file.content
        if self.how == "most" or len(file.written) == 1:
            return latest
        kept = synced or b""
        if self.how == "least":
            return kept
        rest = latest[len(kept) :] if latest.startswith(kept) else latest
        head = kept if latest.startswith(kept) else b""
        part = self._draw.randrange(len(rest) + 1)
        zeros = b"\0" * (len(rest) - part)
        whole = self._draw.choice(file.written[1:]) or b""
        return self._draw.choice([kept, latest, whole, head + rest[:part], head + rest[:part] + zeros, head + zeros])


class Disk:
    """The folder of a recording, as far as its events have been done."""

    def __init__(self) -> None:
        self.root = Folder()
        self.promised: list[str] = []

    def do(self, event: Event) -> None:
        folder, name = self._parent(event.path)
        match event.kind:
            case "create":
                if name not in folder.names:  # else another process has seen it first
                    folder.change({name: File()})
            case "data":
                file = folder.names[name]
                assert isinstance(file, File)
                if file.content != event.data:
                    file.written.append(event.data)
            case "link":
                other, target = self._parent(event.other)
                other.change({target: folder.names[name]})
            case "rename":
                other, target = self._parent(event.other)
                assert other is folder, "a rename from one folder to another is not modelled"
                folder.change({target: folder.names[name], name: None})
            case "unlink" | "rmdir":
                folder.change({name: None})
            case "mkdir":
                folder.change({name: Folder()})
            case "fsync":
                self._sync(self.root if event.path == "." else folder.names[name])
            case "promise":
                self.promised.append(event.path)

    def _parent(self, path: str) -> tuple[Folder, str]:
        *parts, name = path.split("/")
        folder = self.root
        for part in parts:
            found = folder.names[part]
            assert isinstance(found, Folder)
            folder = found
        return folder, name

    def _sync(self, one: File | Folder) -> None:
        if isinstance(one, File):
            one.written = [one.content]
        else:
            one.synced, one.pending = dict(one.names), []

    def files(self, loss: Loss) -> Iterator[tuple[str, bytes | None]]:
        """Path and content of all that is there; None: a folder, before what is in it."""
        yield from _files(self.root, loss, "")

    def write(self, target: Path, loss: Loss) -> None:
        for path, content in self.files(loss):
            if content is None:
                (target / path).mkdir()
            else:
                (target / path).write_bytes(content)


def _files(folder: Folder, loss: Loss, path: str) -> Iterator[tuple[str, bytes | None]]:
    for name, one in sorted(loss.entries(folder).items()):
        if isinstance(one, File):
            yield path + name, loss.content(one)
        else:
            yield path + name, None
            yield from _files(one, loss, f"{path}{name}/")
