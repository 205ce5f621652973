"""Malicious checkpoints are refused with a message and do not affect this process."""

import io
import json
import os
import pickle
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from gemctl.checkpoint import metadata as laid
from gemctl.checkpoint.diff import compare
from gemctl.checkpoint.export import export
from gemctl.cli import main
from gemctl.errors import GemctlError, InputError
from gemctl.run.manifest import Manifest, RunFacts, StoredObject, describe_file, publish, read, verify

DATA, VALUES = "__0_0.distcp", torch.arange(12, dtype=torch.float32).view(4, 3)


def saved(values: torch.Tensor) -> bytes:
    """A piece in DCP's file format."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


@dataclass
class Forged:
    """A checkpoint of one tensor in two pieces, written by hand."""

    folder: Path
    pieces: list[bytes] = field(default_factory=lambda: [saved(VALUES[:2].clone()), saved(VALUES[2:].clone())])

    def metadata(self) -> Metadata:
        size = torch.Size([2, 3])
        offsets = [torch.Size([0, 0]), torch.Size([2, 0])]
        chunks = [ChunkStorageMetadata(offset, size) for offset in offsets]
        entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), VALUES.size(), chunks)
        starts, lengths = (0, len(self.pieces[0])), [len(piece) for piece in self.pieces]
        places = {
            MetadataIndex("w", offset, at): _StorageInfo(DATA, starts[at], lengths[at])
            for at, offset in enumerate(offsets)
        }
        return Metadata({"w": entry}, None, places, StorageMeta(self.folder, "saved"), "1.0.0")

    def write(self, pickled: bytes | None = None, **changes: Any) -> Path:
        self.folder.mkdir(parents=True)
        (self.folder / DATA).write_bytes(b"".join(self.pieces))
        (self.folder / ".metadata").write_bytes(pickled or pickle.dumps(self.metadata()))
        files = {name: describe_file(self.folder / name) for name in (DATA, ".metadata")}
        stored = StoredObject([4, 3], "float32", 48, "replicated", 2)
        facts = RunFacts(1, {}, ["here"], "", "", 0, {})
        manifest = Manifest(1, 1, facts, {}, {"w": stored}, files)
        publish(self.folder, replace(manifest, **changes))
        return self.folder


@pytest.fixture
def forged(tmp_path: Path) -> Forged:
    return Forged(tmp_path / "step_1.a1")


def test_the_forged_checkpoint_is_taken_where_nothing_is_wrong_with_it(forged: Forged, tmp_path: Path) -> None:
    folder = forged.write()
    assert verify(folder) == [] and compare(folder, folder).differences == []
    export(folder, tmp_path / "out", 1 << 30, optimizer=False)
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    assert data[start:] == VALUES.numpy().tobytes()


@pytest.mark.parametrize("name", ["../../other", "/dev/zero", "..", ".", "", "a/b", "manifest.json", "a\0b"])
def test_files_that_a_manifest_names_elsewhere_are_not_looked_at(forged: Forged, name: str) -> None:
    folder = forged.write(files={name: describe_file(Path(__file__))})
    (fault,) = verify(folder)
    assert fault == f"{folder}/manifest.json: {name!r} is not the name of a file in this folder"


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link_out(path: Path) -> None:
    aside = path.parent.parent / "aside"
    aside.write_bytes(b"".join(Forged(path).pieces))
    path.symlink_to(aside)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("plant", [_fifo, _link_out, _device, _loop])
@pytest.mark.parametrize("name", [DATA, "manifest.json"])
def test_what_is_no_file_of_the_folder_is_told_at_once(
    forged: Forged, plant: Callable[[Path], None], name: str
) -> None:
    folder = forged.write()
    (folder / name).unlink()
    plant(folder / name)
    start = time.monotonic()
    assert len(verify(folder)) == 1
    with pytest.raises(InputError, match=f"{name}: "):
        compare(folder, folder)
    assert time.monotonic() - start < 2


def test_a_huge_manifest_is_refused_before_it_is_read(forged: Forged, capsys: pytest.CaptureFixture[str]) -> None:
    folder = forged.write()
    with (folder / "manifest.json").open("r+b") as file:
        file.truncate(10 << 30)  # sparse
    assert main(["checkpoint", "verify", str(folder)]) == 1
    assert "manifest.json: 10737418240 bytes, more than" in capsys.readouterr().out


def test_a_deeply_nested_manifest_is_refused(forged: Forged) -> None:
    folder = forged.write()
    (folder / "manifest.json").write_text('{"position": ' + "[" * 200_000 + "]" * 200_000 + "}")
    (fault,) = verify(folder)
    assert "manifest.json: not JSON" in fault


def _refused(folder: Path) -> str:
    with pytest.raises(InputError) as error:
        compare(folder, folder)
    assert str(error.value).startswith(f"{folder}/.metadata: ")
    return str(error.value)


class Op:
    """Instructions of a pickle."""

    @staticmethod
    def name(module: str, name: str) -> bytes:
        return b"".join(pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module, name)) + (
            pickle.STACK_GLOBAL
        )

    @staticmethod
    def text(text: str) -> bytes:
        return pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode()


META = "torch.distributed.checkpoint.metadata"


def test_a_pickle_cannot_change_a_class_of_this_process(forged: Forged) -> None:
    """BUILD on a class with a pair of states sets the class's own attributes, in Python's unpickler."""
    before = Metadata.__init__, _StorageInfo.__dict__.get("transform_descriptors")
    storage = Op.name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    state = pickle.NONE + pickle.EMPTY_DICT + Op.text("relative_path") + Op.text("../../x") + pickle.SETITEM
    program = pickle.PROTO + b"\x04" + storage + state + pickle.TUPLE2 + pickle.BUILD + pickle.STOP
    assert "refused: it changes an object that it has not created" in _refused(forged.write(program))
    assert not hasattr(_StorageInfo, "relative_path")
    assert (Metadata.__init__, _StorageInfo.__dict__.get("transform_descriptors")) == before


PROGRAMS = {
    "calls a function": Op.name("os", "getpid") + pickle.EMPTY_TUPLE + pickle.REDUCE,
    "calls by the old instruction": pickle.MARK + pickle.INST + b"os\ngetpid\n",
    "old way to name": pickle.GLOBAL + b"os\ngetpid\n",
    "getattr of a module's": Op.name("builtins", "getattr")
    + (Op.name(META, "Metadata") + Op.text("__init__") + pickle.TUPLE2)
    + pickle.REDUCE,
    "calls what it was given": Op.name("builtins", "getattr")
    + (Op.name(META, "Metadata") + Op.text("__class__") + pickle.TUPLE2 + pickle.REDUCE)
    + (pickle.EMPTY_TUPLE + pickle.REDUCE),
    "builds twice": Op.name(META, "Metadata")
    + (pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.BUILD + pickle.EMPTY_DICT + pickle.BUILD),
    "builds a string": Op.text("x") + pickle.EMPTY_DICT + pickle.BUILD,
    "a reference by id": pickle.PERSID + b"x\n",
    "an extension": pickle.EXT1 + b"\x01",
    "memory by a number, memo": pickle.NONE + pickle.LONG_BINPUT + struct.pack("<I", 0xFFFFFFFF),
    "memory by a number, bytes": pickle.BYTEARRAY8 + struct.pack("<Q", 1 << 40),
    "memory by a number, text": pickle.BINUNICODE8 + struct.pack("<Q", 1 << 40),
    "a frame of a terabyte": pickle.FRAME + struct.pack("<Q", 1 << 40) + pickle.NONE,
    "nothing on the stack": pickle.REDUCE,
    "no end": pickle.NONE,
    "no metadata": pickle.EMPTY_DICT,
    "no pickle": b"\xff" * 100,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_pickle_that_is_more_than_metadata_is_refused(forged: Forged, name: str) -> None:
    end = b"" if name == "no end" else pickle.STOP
    tracemalloc.start()
    said = _refused(forged.write(pickle.PROTO + b"\x04" + PROGRAMS[name] + end))
    assert "refused" in said or "damaged" in said
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_a_nest_of_tuples_as_a_key_takes_no_time(forged: Forged) -> None:
    """Each level contains the previous one twice, so hashing takes twice as long."""
    nest = pickle.NONE + pickle.MEMOIZE
    for level in range(60):
        nest += pickle.BINGET + bytes([level]) + pickle.TUPLE2 + pickle.MEMOIZE
    program = pickle.PROTO + b"\x04" + pickle.EMPTY_DICT + nest + pickle.NONE + pickle.SETITEM + pickle.STOP
    start = time.monotonic()
    assert "a key is neither a name nor an index" in _refused(forged.write(program))
    assert time.monotonic() - start < 2


def _change(edit: Callable[[Metadata], object]) -> Callable[[Forged], bytes]:
    def pickled(forged: Forged) -> bytes:
        metadata = forged.metadata()
        edit(metadata)
        return pickle.dumps(metadata)

    return pickled


def _first(metadata: Metadata) -> _StorageInfo:
    place: _StorageInfo = next(iter(metadata.storage_data.values()))
    return place


def _entry(metadata: Metadata) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


CHANGES = {
    "points to ../x": lambda metadata: setattr(_first(metadata), "relative_path", "../x"),
    "is outside of __0_0.distcp": lambda metadata: setattr(_first(metadata), "offset", 1 << 40),
    "a piece of w is outside of __0_0.distcp: ": lambda metadata: setattr(_first(metadata), "offset", -1),
    "for 24 bytes of values": lambda metadata: setattr(_first(metadata), "length", 0),
    "offset is a str": lambda metadata: setattr(_first(metadata), "offset", "0"),
    "length is a bool": lambda metadata: setattr(_first(metadata), "length", True),
    "which the manifest does not list": lambda metadata: setattr(_first(metadata), "transform_descriptors", ["zstd"]),
    "w is torch.float32 [4, 2]": lambda metadata: setattr(_entry(metadata), "size", torch.Size([4, 2])),
    "w is torch.float64 [4, 3]": lambda metadata: setattr(_entry(metadata).properties, "dtype", torch.float64),
    "w has 1 pieces": lambda metadata: _entry(metadata).chunks.pop(),
    "a piece of w is out of bounds": lambda metadata: setattr(
        _entry(metadata).chunks[0], "offsets", torch.Size([3, 0])
    ),
    "two pieces of w are at [0, 0]": lambda metadata: setattr(
        _entry(metadata).chunks[1], "offsets", torch.Size([0, 0])
    ),
    "the pieces of w do not add up to it": lambda metadata: setattr(
        _entry(metadata).chunks[0], "sizes", torch.Size([1, 3])
    ),
    "its tensors are not those of the manifest: v": lambda metadata: metadata.state_dict_metadata.update(
        v=_entry(metadata)
    ),
    "the place of a piece of w is missing": lambda metadata: metadata.storage_data.popitem(),
    "which does not exist": lambda metadata: metadata.storage_data.update(
        {MetadataIndex("w", torch.Size([1, 0])): _first(metadata)}
    ),
    "a shape that no tensor can have": lambda metadata: setattr(
        _entry(metadata), "size", torch.Size([1 << 40, 1 << 40])
    ),
    "a shape is not a tuple of numbers": lambda metadata: setattr(_entry(metadata), "size", [4, 3]),
    "expected a TensorStorageMetadata, got a StorageMeta": lambda metadata: metadata.state_dict_metadata.update(
        w=StorageMeta()
    ),
}


@pytest.mark.parametrize("said", CHANGES)
def test_metadata_that_does_not_agree_with_the_manifest_is_refused(forged: Forged, said: str) -> None:
    assert said in _refused(forged.write(_change(CHANGES[said])(forged)))


def test_pieces_that_share_their_room_in_a_file_are_refused(forged: Forged) -> None:
    """Otherwise a small file could expand to any number of bytes."""

    def share(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.offset, place.length = 0, sum(map(len, forged.pieces)) - 1

    assert "is outside of" in _refused(forged.write(_change(share)(forged)))


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (StoredObject([4, 3], "load", 48, "", 2), "the manifest says load [4, 3]"),
        (StoredObject([4, 3], "float32", 1 << 50, "", 2), "w has 48 bytes, the manifest says"),
        (StoredObject([1 << 30, 3], "float32", 48, "", 2), "the manifest says float32 [1073741824, 3]"),
    ],
)
def test_a_manifest_whose_objects_are_not_there_is_refused_before_room_is_made(
    forged: Forged, tmp_path: Path, stored: StoredObject, said: str
) -> None:
    folder = forged.write(objects={"w": stored})
    assert said in _refused(folder)
    with pytest.raises(InputError):
        export(folder, tmp_path / "out", 1 << 30, optimizer=False)
    assert not (tmp_path / "out").exists()


def test_metadata_larger_than_its_tensors_can_need_is_not_read(forged: Forged) -> None:
    program = pickle.dumps(forged.metadata())[:-1] + pickle.NONE * (2 << 20) + pickle.STOP
    assert "bytes, more than" in _refused(forged.write(program))


def test_room_for_metadata_grows_with_the_pieces(forged: Forged, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = forged.write()
    monkeypatch.setattr(laid, "MOST_BESIDE", 0)
    monkeypatch.setattr(laid, "MOST_OF_A_PIECE", (folder / ".metadata").stat().st_size // 2 + 1)
    assert compare(folder, folder).differences == []
    monkeypatch.setattr(laid, "MOST_OF_A_PIECE", (folder / ".metadata").stat().st_size // 2 - 1)
    assert "bytes, more than" in _refused(folder)


def test_a_piece_that_grows_when_it_is_unpacked_is_refused(forged: Forged) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(forged.pieces[0])) as whole, zipfile.ZipFile(packed, "w") as target:
        for entry in whole.infolist():
            target.writestr(entry.filename, whole.read(entry), zipfile.ZIP_DEFLATED)
    forged.pieces[0] = packed.getvalue()
    folder = forged.write()
    with pytest.raises(GemctlError, match="refused: a piece is compressed"):
        compare(folder, folder)


def test_a_piece_that_is_no_archive_is_told(forged: Forged) -> None:
    forged.pieces[1] = bytes(range(200))
    folder = forged.write()
    with pytest.raises(GemctlError, match="a piece is damaged"):
        compare(folder, folder)


def test_names_of_classes_are_names_alone(forged: Forged) -> None:
    found = laid._Parser(io.BytesIO(pickle.dumps(forged.metadata()))).load()
    assert (type(found), found.of.name, found.arguments) == (laid._Made, "Metadata", ())
    assert type(found.state["state_dict_metadata"]["w"]) is laid._Made


def test_the_manifest_of_a_run_stays_readable(forged: Forged) -> None:
    """Real saves are not refused: file names with dots and digits."""
    manifest = read(forged.write())
    assert json.dumps(sorted(manifest.files)) == json.dumps([".metadata", DATA])
