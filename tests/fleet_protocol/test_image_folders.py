"""Folders of images: which folders are labels, which files are images, and how they are turned."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from fleet_protocol.data import DataConfig, load_data
from fleet_protocol.data.contract import reconcile
from fleet_protocol.data.terms import DataContract
from fleet_protocol.errors import DataError, MismatchError

CONFIG = TypeAdapter(DataConfig)
PIXELS = np.arange(20, dtype=np.uint8).reshape(4, 5) * 9


def write(folder, *names):
    """Images, and files of other kinds."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in {".png", ".jfif"} and not path.name.startswith("."):
            Image.fromarray(PIXELS).save(path, "PNG" if path.suffix == ".png" else "JPEG")
        else:
            path.write_bytes(b"x")


def load(folder, **keys):
    return load_data(
        CONFIG.validate_python({"kind": "images", "path": folder, "channels": 1, **keys})
    )


@pytest.mark.parametrize(
    ("beside", "kind"),
    [
        (".ipynb_checkpoints/1.png", "hidden files or folders"),
        (".Trash-1000/info/1.png", "hidden files or folders"),
        ("@eaDir/1.png", "system folders"),
        ("__MACOSX/a/1.png", "system folders"),
        ("lost+found/1.png", "system folders"),
        ("System Volume Information/1.png", "system folders"),
        ("$RECYCLE.BIN/1.png", "system folders"),
        ("aardvark/notes.txt", "folders without images"),
        ("cat/._1.png", "hidden files or folders"),
        ("cat/@eaDir/1.png", "system folders"),
        ("cat/.thumbs/1.png", "hidden files or folders"),
        ("cat/Thumbs.db", "files that are not images"),
        ("loose.png", "images outside label folders"),
    ],
)
def test_what_a_system_puts_beside_images_is_left_out_and_counted(tmp_path, beside, kind):
    """It is neither a label nor an image, and the numbers of the labels stay."""
    write(tmp_path, "cat/1.png", "dog/1.png", beside)
    data = load(tmp_path)
    assert (data.label_names, data.y.tolist()) == (("cat", "dog"), [0, 1])
    assert kind in data.facts.left_out


def test_an_empty_folder_is_no_label(tmp_path):
    """A board that has no sample of a class yet must not shift the others."""
    write(tmp_path, "cat/1.png", "dog/1.png")
    (tmp_path / "ant").mkdir()
    assert load(tmp_path).label_names == ("cat", "dog")
    assert load(tmp_path, labels=["ant", "cat", "dog"]).y.tolist() == [1, 2]


def test_folders_below_a_label_are_read(tmp_path):
    """Sessions, days or cameras below a label, however deep."""
    write(tmp_path, "cat/2.png", "cat/monday/am/1.png", "dog/1.png")
    data = load(tmp_path)
    assert data.y.tolist() == [0, 0, 1]
    assert not data.facts.left_out


def test_jfif_is_an_image(tmp_path):
    """Browsers on Windows save photographs so."""
    write(tmp_path, "cat/1.png", "dog/1.jfif")
    assert load(tmp_path).y.tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP"])
def test_an_image_of_several_frames_is_refused(tmp_path, kind):
    """Its first frame alone would be read without a word."""
    write(tmp_path, "cat/1.png", "dog/1.png")
    frames = [Image.fromarray(PIXELS + shade) for shade in (0, 40, 80)]
    frames[0].save(tmp_path / "cat/2.gif", kind, save_all=True, append_images=frames[1:])
    with pytest.raises(DataError, match=r"cat/2\.gif has 3 frames, but a sample is one image"):
        load(tmp_path)


def png_of_16_bits(colour, channels):
    """A PNG of 2 x 2 pixels with 16 bits a channel, as no version of Pillow writes in colour."""
    rows = (b"\0" + b"\x12\x34" * 2 * channels) * 2
    head = struct.pack(">IIBBBBB", 2, 2, 16, colour, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        check = struct.pack(">I", zlib.crc32(name + body))
        data += struct.pack(">I", len(body)) + name + body + check
    return data


@pytest.mark.parametrize(
    "data",
    [
        png_of_16_bits(0, 1),
        png_of_16_bits(4, 2),
        png_of_16_bits(2, 3),
        png_of_16_bits(6, 4),
        b"P6 2 2 65535\n" + b"\x12\x34" * 12,
    ],
    ids=["grey", "grey with alpha", "colour", "colour with alpha", "PPM"],
)
def test_images_of_16_bits_a_channel_are_refused(tmp_path, data):
    """Pillow keeps the upper half of each number in colour, without a word."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/1.png").write_bytes(data)
    with pytest.raises(DataError, match=r"cat/1\.png has more than 8 bits a channel"):
        load(tmp_path)


def test_a_size_beyond_the_bound_of_pixels_is_refused(tmp_path):
    """Enlarging the first image would fill the memory."""
    write(tmp_path, "cat/1.png")
    with pytest.raises(DataError, match=r"`size` .* of 10,000 pixels .* the limit is 9,999"):
        load(tmp_path, size=[100, 100], bounds={"pixels": 9_999})
    assert load(tmp_path, size=[100, 100], bounds={"pixels": 10_000}).x.shape == (1, 1, 100, 100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.png,cat\n", "line 1 of .* has 'cat' after the image, expected numbers: .*`labels`"),
        ("1.png,1_0\n", "line 1 of .* has '1_0' after the image"),
        ("1.png,0\n2.png,1\n1.png,1\n", "line 3 of .* lists 1.png again, which line 1 has"),
        ("1.png;0\n", "line 1 of .* has no number after the image; .*with commas"),
        ("1.png,0\n2.png,0,1\n", "line 2 of .* has 2 numbers; all lines need the same count"),
    ],
)
def test_a_table_of_images_names_the_line_to_correct(tmp_path, text, message):
    """Names, numbers that Python alone reads, images listed twice, and other delimiters."""
    write(tmp_path, "1.png", "2.png")
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        load(tmp_path, targets=tmp_path / "t.csv")


def test_images_are_turned_as_viewers_show_them(tmp_path):
    """A camera says how it was held; damaged notes of it change nothing."""
    for orientation, turns in ((1, 0), (6, 1), (3, 2), (8, 3)):
        notes = Image.Exif()
        notes[274] = orientation
        folder = tmp_path / str(orientation)
        (folder / "cat").mkdir(parents=True)
        Image.fromarray(np.rot90(PIXELS, turns)).save(folder / "cat" / "1.png", exif=notes)
        assert (load(folder).x[0, 0] == PIXELS).all()
    (tmp_path / "bad" / "cat").mkdir(parents=True)
    Image.fromarray(PIXELS).save(
        tmp_path / "bad" / "cat" / "1.png", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"
    )
    assert (load(tmp_path / "bad").x[0, 0] == PIXELS).all()


def test_names_with_accents_are_one_name_however_they_are_stored(tmp_path):
    """On macOS an accent is a character of its own."""
    write(tmp_path, "cafe\u0301/1.png", "the\u0301/1.png")
    assert load(tmp_path, labels=["th\u00e9", "caf\u00e9"]).y.tolist() == [0, 1]
    assert load(tmp_path).label_names == ("caf\u00e9", "th\u00e9")


def test_a_folder_without_any_label_says_what_it_left_out(tmp_path):
    """The remedy is in what was passed over."""
    write(tmp_path, "1.png", ".x/1.png")
    with pytest.raises(
        DataError, match=r"is empty: expected <label>/<image> files in it \(left out: 1 hidden"
    ):
        load(tmp_path)


def test_a_folder_with_images_that_labels_forgets_is_refused(tmp_path):
    """One that is hidden or has none is not missed."""
    write(tmp_path, "cat/1.png", "dog/1.png", ".x/1.png", "empty/notes.txt")
    with pytest.raises(DataError, match="has a folder 'dog' that `labels` does not list"):
        load(tmp_path, labels=["cat"])
    assert load(tmp_path, labels=["dog", "cat"]).y.tolist() == [0, 1]


def test_numbers_of_images_have_the_names_that_labels_says(tmp_path):
    """Number i is the name i, as in a table; several numbers of an image have none."""
    write(tmp_path, "1.png", "2.png")
    (tmp_path / "t.csv").write_text("1.png,1\n2.png,0\n")
    keys = {"targets": tmp_path / "t.csv"}
    named = load(tmp_path, labels=["dog", "cat"], **keys)
    assert (named.label_names, named.y.tolist()) == (("dog", "cat"), [1, 0])
    contract = DataContract(labels=("cat", "dog"))
    assert reconcile(named, contract).y.tolist() == [0, 1]
    with pytest.raises(
        MismatchError, match="has numbers as labels, and the fleet's labels have names"
    ):
        reconcile(load(tmp_path, **keys), contract)
    with pytest.raises(
        DataError,
        match=r"line 1 of .*t\.csv has the label 1, and `labels` in .* the numbers 0 to 0",
    ):
        load(tmp_path, labels=["dog"], **keys)
    (tmp_path / "t.csv").write_text("1.png,1,0\n2.png,0,1\n")
    assert reconcile(load(tmp_path, **keys), contract).y.tolist() == [[1, 0], [0, 1]]


def test_links_below_a_label_are_counted(tmp_path):
    """They are not followed, because a link may lead in a circle."""
    folder = tmp_path / "images"
    write(folder, "cat/1.png")
    (folder / "cat" / "more").symlink_to(folder)
    data = load(folder)
    assert len(data) == 1
    assert data.facts.left_out == {"links to folders below a label": 1}


def test_a_label_is_listed_once(tmp_path):
    """Else its images count twice, under two labels."""
    with pytest.raises(ValidationError, match="'cat' is listed 2 times"):
        load(tmp_path, labels=["cat", "dog", "cat "])


def test_a_folder_that_is_spelt_otherwise_is_suggested(tmp_path):
    """Names count as they are written."""
    write(tmp_path, "Cat/1.png", "dog/1.png")
    config = {"kind": "images", "path": tmp_path, "labels": ["dog", "cat"]}
    with pytest.raises(DataError, match=r"'Cat' that `labels` does not list \(did you mean 'cat'"):
        load_data(CONFIG.validate_python(config))
