"""The table of what is refused of names, files and archives that come from others."""

import ast
import os
import pickle
import re
import shlex
import socket
import stat
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fleet_protocol.data import load_data
from fleet_protocol.data.sources import ImagesData, NpzData
from fleet_protocol.errors import BlobError, DataError, single_line, visible
from fleet_protocol.foreign_archives import Bounds, check_archive, open_archive
from fleet_protocol.foreign_files import name_problem, path_within, read_within, twins
from fleet_protocol.manifest import FileSpec
from fleet_protocol.mapped_tensors import open_tensors

ROOT = Path(__file__).parents[2]
NAMES = {
    "absolute": "/etc/hostname",
    "climbing": "../secret",
    "climbing in the middle": "graphs/../../secret",
    "climbing at the end": "graphs/..",
    "a drive": "C:/secret",
    "a backslash": "graphs\\..\\secret",
    "a NUL": "graph\0.onnx",
    "a line end": "graph\n.onnx",
    "an escape sequence": "graph\x1b[2J.onnx",
    "a mark of direction": "graph\u202exnno",
    "half a letter": "graph\ud800",
    "not composed": "ze\u0301ro",
    "nothing": "",
    "an empty part": "graphs//train.onnx",
    "the folder itself": ".",
    "a long part": "x" * 256,
    "a long name": "/".join(["x" * 200] * 6),
}


@pytest.mark.attack(
    "file",
    "A manifest names files by absolute paths, by paths that lead out of the folder, or by names "
    "with control characters",
    "refused with an error that shows the name",
    "2026-11-28",
)
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_that_leads_elsewhere_is_refused(name, tmp_path):
    """By the function, as the type of a manifest's field, when a file is opened, and as a member of
    an archive.
    """
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "set"
    (folder / "graphs").mkdir(parents=True)
    assert name_problem(name)
    with pytest.raises(ValueError, match="does not name a file of its folder"):
        FileSpec(path=name, digest="0" * 64, size=6)
    with pytest.raises(BlobError, match="does not name a file of this folder"):
        path_within(folder, name)


@pytest.mark.parametrize(
    "name", ["train.onnx", "ort-training/step.onnx", "Größe 7.csv", "..a", "日本/\u3000.png"]
)
def test_a_name_within_the_folder_is_read(name, tmp_path):
    """Also with spaces, letters of any script, and two dots that are none of their own."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"content")
    assert FileSpec(path=name, digest="0" * 64, size=7).path == name
    assert read_within(tmp_path, name) == b"content"


def link_out(folder):
    (folder / "file").symlink_to(folder.parent / "secret")


def link_in_the_middle(folder):
    (folder / "file").symlink_to("inner/secret")
    (folder / "inner").symlink_to(folder.parent)


def link_in_a_circle(folder):
    (folder / "file").symlink_to("file")


def link_to_a_device(folder):
    (folder / "file").symlink_to("/dev/zero")


def pipe(folder):
    os.mkfifo(folder / "file")


def listening(folder):
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(folder / "file"))


def device(folder):
    try:
        os.mknod(folder / "file", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")


def inner_folder(folder):
    (folder / "file").mkdir()


def absent(_):
    pass


@pytest.mark.attack(
    "file",
    "A set has links that lead out of it, pipes, sockets or devices in place of files",
    "refused immediately with an error that names the file",
    "2026-11-28",
)
@pytest.mark.parametrize(
    "place",
    [
        link_out,
        link_in_the_middle,
        link_in_a_circle,
        link_to_a_device,
        pipe,
        listening,
        device,
        inner_folder,
        absent,
    ],
    ids=lambda place: place.__name__,
)
def test_what_is_no_file_of_the_folder_is_not_read(place, tmp_path, monkeypatch):
    """Whatever lies there instead, it is refused at once, by name."""
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "set"
    folder.mkdir()
    monkeypatch.chdir(folder)
    place(folder)
    with pytest.raises(BlobError, match=r"set/file"):
        read_within(folder, "file")


def test_links_within_the_folder_are_followed(tmp_path):
    """Also where the folder itself is reached by a link, and the path that comes back has none."""
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "real" / "inner" / "file").write_bytes(b"content")
    (tmp_path / "real" / "same").symlink_to("inner/file")
    (tmp_path / "linked").symlink_to("real")
    assert (
        path_within(tmp_path / "linked", "same") == (tmp_path / "real" / "inner" / "file").resolve()
    )


def test_a_document_is_read_up_to_its_limit(tmp_path):
    """One more byte is refused, and not read."""
    (tmp_path / "manifest.json").write_bytes(b"x" * 11)
    assert len(read_within(tmp_path, "manifest.json", 11)) == 11
    with pytest.raises(BlobError, match="more than 10 bytes"):
        read_within(tmp_path, "manifest.json", 10)


def test_twins_are_names_that_some_systems_take_for_one():
    """They differ in case, or in how their letters are composed; the same name twice is none."""
    assert twins(["a/B", "c", "a/b"]) == ("a/B", "a/b")
    assert twins(["zéro", "c", "ze\u0301ro"]) == ("zéro", "ze\u0301ro")
    assert twins(["straße", "STRASSE"]) == ("straße", "STRASSE")
    assert twins(["a", "b", "a", "ab"]) is None


def zipped(path, members, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def patched(path, old, new, *, last=True):
    """Write other bytes in the place of some, in the list of members or in front of a content."""
    data = bytearray(path.read_bytes())
    at = data.rindex(old) if last else data.index(old)
    data[at : at + len(new)] = new
    path.write_bytes(data)


def zip_with_twins(path):
    zipped(path, {"a": b"1", "A": b"2"})


def zip_with_unicode_twins(path):
    zipped(path, {"zéro": b"1", "ZÉRO": b"2"})


def zip_with_one_name_twice(path):
    zipped(path, {"a": b"1", "b": b"2"})
    data = path.read_bytes().replace(b"b", b"a")
    path.write_bytes(data)


def zip_with_a_link(path):
    link = zipfile.ZipInfo("link")
    link.create_system = 3
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(link, "/etc/passwd")


def zip_with_a_device(path):
    entry = zipfile.ZipInfo("zero")
    entry.create_system = 3
    entry.external_attr = (stat.S_IFCHR | 0o600) << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(entry, b"")


def zip_that_is_encrypted(path):
    zipped(path, {"a": b"1"})
    patched(path, b"PK\x01\x02\x14\x03\x14\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01\x00")


def zip_of_another_method(path):
    zipped(path, {"a": b"1" * 100}, compression=zipfile.ZIP_LZMA)


def zip_bomb(path):
    zipped(path, {"a": bytes(50_000_000)}, compression=zipfile.ZIP_DEFLATED)


def zip_beyond_its_size(path):
    rng = np.random.default_rng(1)
    zipped(path, {str(number): rng.bytes(1_000_000) for number in range(11)})


def zip_of_many(path):
    zipped(path, {str(number): b"" for number in range(1001)})


def zip_with_a_header_bomb(path):
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(900):
            entry = zipfile.ZipInfo(str(number))
            entry.comment = bytes(65_000)
            archive.writestr(entry, b"")


def no_zip(path):
    path.write_bytes(b"a letter")


def torn_zip(path):
    zipped(path, {"a": b"1"})
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.attack(
    "file",
    "An archive contains duplicate names, links, decompression bombs, or encrypted or endless "
    "members",
    "refused before anything is unpacked",
    "2026-11-28",
)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (zip_with_twins, "the same file on some systems"),
        (zip_with_unicode_twins, "the same file on some systems"),
        (zip_with_one_name_twice, "it occurs twice"),
        (zip_with_a_link, "a link, a device"),
        (zip_with_a_device, "a link, a device"),
        (zip_that_is_encrypted, "encrypted"),
        (zip_of_another_method, "compression method 14"),
        (zip_bomb, "times as many"),
        (zip_beyond_its_size, "11,000,000 bytes; the limit is 10,000,000"),
        (zip_of_many, "1,001 members; the limit is 1,000"),
        (zip_with_a_header_bomb, "list of members"),
        (no_zip, "not a complete zip archive"),
        (torn_zip, "not a complete zip archive"),
        (os.mkfifo, "not a regular file"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_archive_beyond_its_bounds_is_refused(make, said, tmp_path):
    """Before anything of it is unpacked, by its name."""
    path = tmp_path / "foreign.zip"
    make(path)
    most = 10_000_000 if make is zip_beyond_its_size else 10**8
    with pytest.raises(BlobError, match=said) as caught:
        check_archive(path, Bounds(members=1000, unpacked_bytes=most))
    assert "foreign.zip" in str(caught.value)


@pytest.mark.parametrize(
    "kind", sorted(set(NAMES) - {"half a letter"})
)  # which no zip archive can hold
def test_a_member_that_leads_elsewhere_is_refused(kind, tmp_path):
    """A member of an archive is named as every other file is."""
    name = NAMES[kind]
    written = zipfile.ZipInfo("x")
    written.filename = name
    with zipfile.ZipFile(tmp_path / "foreign.zip", "w") as archive:
        archive.writestr(written, b"secret")
    with pytest.raises(BlobError, match="is refused"):
        check_archive(tmp_path / "foreign.zip")


def test_an_archive_within_its_bounds_is_read(tmp_path):
    """With folders, deflated and stored members, in pieces."""
    text = b"harmless " * 200_000
    with zipfile.ZipFile(tmp_path / "good.zip", "w") as archive:
        archive.mkdir("inner") if hasattr(archive, "mkdir") else archive.writestr("inner/", "")
        archive.writestr("inner/text", text, compress_type=zipfile.ZIP_DEFLATED)
        archive.writestr("stored", b"x")
        archive.comment = b"hello"
    with open_archive(tmp_path / "good.zip", Bounds(ratio=1000)) as found:
        assert dict(found.members) == {"inner/text": len(text), "stored": 1}
        assert b"".join(found.pieces("inner/text")) == text
        assert found.read("stored", 1) == b"x"
        assert found.comment == b"hello"
        with pytest.raises(BlobError, match="more than 10 bytes"):
            found.read("inner/text", 10)


def test_an_archive_that_its_user_names_by_a_link_is_read(tmp_path):
    """What lies in an archive is foreign; where it lies its user knows."""
    zipped(tmp_path / "good.zip", {"a": b"1"})
    (tmp_path / "newest.zip").symlink_to("good.zip")
    check_archive(tmp_path / "newest.zip")


def test_a_list_that_understates_a_member_gives_no_more_than_it_says(tmp_path):
    """The content goes on beyond the size that the list of members claims: it is refused as
    damaged.
    """
    path = zipped(tmp_path / "lies.zip", {"a": bytes(30_000_000)}, compression=zipfile.ZIP_DEFLATED)
    patched(path, struct.pack("<L", 30_000_000), struct.pack("<L", 1000))
    pieces = []
    with open_archive(path) as archive, pytest.raises(BlobError, match="damaged"):
        pieces.extend(archive.pieces("a"))
    assert sum(map(len, pieces)) <= 1000


@pytest.mark.attack(
    "file",
    "An archive lists a million members",
    "refused, using less than 20 MB of memory",
    "2026-11-28",
)
def test_a_million_members_are_refused_in_little_memory(tmp_path):
    """The list of members is bounded before Python parses it, which would take a gigabyte."""
    path = tmp_path / "many.zip"
    entry = struct.pack(
        "<4s4B4HL2L5H2L", b"PK\x01\x02", 20, 3, 20, 0, 0, 0, 0, 33, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0
    )
    entries = (entry + b"a") * 1_000_000
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, len(entries), 0, 0)
    path.write_bytes(entries + end)
    tracemalloc.start()
    with pytest.raises(BlobError, match="list of members"):
        check_archive(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


class _Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.attack(
    "file",
    "A file of weights or arrays contains a pickle that runs code",
    "refused; no code runs",
    "2026-11-28",
)
def test_pickles_are_never_opened(tmp_path, monkeypatch):
    """One in an npz file, and one that torch.save wrote: neither runs what it holds."""
    monkeypatch.chdir(tmp_path)
    np.savez("foreign.npz", x=np.array([_Harmful()], dtype=object), y=np.zeros(1, np.int64))
    with pytest.raises(DataError, match="Python objects"):
        load_data(NpzData(path=Path("foreign.npz")))
    with zipfile.ZipFile("foreign.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Harmful()))
    with pytest.raises(BlobError, match=r"torch\.save, which may run code"):
        open_tensors(Path("foreign.pt"))
    assert not Path("harm").exists()


@pytest.mark.attack(
    "file",
    "A set has a file from `torch.save` with a name that a shell would execute if somebody "
    "copied the printed command",
    "the name is quoted for a shell and for Python",
    "2026-11-28",
)
@pytest.mark.parametrize(
    "name", ["$(touch harm).pt", "`touch harm`.pt", "a'b;touch harm.pt", '"))']
)
def test_the_command_that_converts_weights_is_words_for_a_shell(name, tmp_path, monkeypatch):
    """Its program, too, is of words that Python does not run."""
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(name, "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    with pytest.raises(BlobError) as caught:
        open_tensors(Path(name))
    command = shlex.split(str(caught.value).partition("safetensors: ")[2])
    assert command[:2] == ["python", "-c"]
    (call,) = [
        node
        for node in ast.walk(ast.parse(command[2]))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert ast.literal_eval(call.args[0]) == name


@pytest.mark.parametrize("text", ["\x1b[2J", "\x9b31m", "\u202e", "a\rb", "\x07", "\ud800", "\0"])
def test_what_a_terminal_would_obey_is_written_out(text):
    """Nothing of it is left that is a control character; what it was can still be told."""
    for shown in (visible(text), single_line(text)):
        assert shown.isprintable()
    assert visible("Größe\t7\u3000\n") == "Größe\t7\u3000\n"
    assert ascii(text)[1:-1].startswith(visible(text)[:2])


def calls(path):
    """The names of what a module calls, with the line of each."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), f"{path.relative_to(ROOT)}: {ast.unparse(node)}"


def test_no_archive_is_opened_elsewhere():
    """Whoever reads a zip archive reads it within bounds, and nobody unpacks a tar archive; both
    are written.
    """
    found = []
    for package in (
        "broker_server",
        "device_runtime",
        "fleet_protocol",
        "models",
        "shoal",
        "simulation",
        "trainer_export",
    ):
        for path in (ROOT / package).rglob("*.py"):
            found += [
                what
                for name, what in calls(path)
                if re.search(r"(ZipFile|tarfile\.open|TarFile|extractall|unpack_archive)$", name)
            ]
    assert sorted(found) == [
        "broker_server/store/backup.py: ZipFile(file, 'w', strict_timestamps=False)",
        "fleet_protocol/foreign_archives.py: ZipFile(_Listing(file, path, allowed))",
        "shoal/flash/tree.py: tarfile.open(fileobj=buffer, mode='w', format=tarfile.GNU_FORMAT)",
    ]


def test_a_table_of_images_names_images_of_its_folder(tmp_path):
    """A path in a table leads nowhere else, and the line that does is named."""
    Image.new("L", (2, 2)).save(tmp_path / "secret.png")
    (tmp_path / "images").mkdir()
    Image.new("L", (2, 2)).save(tmp_path / "images" / "own.png")
    table = tmp_path / "targets.csv"
    source = ImagesData(path=tmp_path / "images", targets=table, channels=1, shape=(1, 2, 2))
    table.write_text("own.png,1\n")
    assert len(load_data(source)) == 1
    for name in ("../secret.png", str(tmp_path / "secret.png"), "own.png\x1b[2J"):
        table.write_text(f"own.png,1\n{name},2\n")
        with pytest.raises(DataError, match=r"line 2 of .*targets\.csv: .* is not an image in"):
            load_data(source)
