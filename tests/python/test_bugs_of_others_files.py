"""What went wrong in other readers of .npy, .npz and .safetensors files, by project and number, and does not here.

The files are read by the `headway` command.
"""

import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest

import headway
from bugs_support import draw


def command():
    """The command of this package: beside it, or where this Python's commands are."""
    folders = (pathlib.Path(headway.__file__).parents[1] / "bin", pathlib.Path(sys.executable).parent)
    return shutil.which("headway", path=os.pathsep.join(map(str, folders)))


pytestmark = pytest.mark.skipif(command() is None, reason="built without CLI11")


def attend(folder, *sources, **environment):
    """The result of the command over three arrays, or its error text."""
    out = folder / "result.npy"
    program = [command(), "attend", *map(str, sources), "-o", str(out), "--force"]
    ended = subprocess.run(program, capture_output=True, text=True, env={**os.environ, **environment})
    assert ended.returncode in (0, 1, 2), ended  # no crash
    return np.load(out) if ended.returncode == 0 else ended.stderr


def read(folder, source, like):
    """Attention over an array of a file; the same as over `like` if it was read well."""
    return np.array_equal(attend(folder, source, source, source), headway.attention(like, like, like))


# ---- .npy ----


def with_header(path, header, data, version=1):
    """An .npy file with this text for its header."""
    size = struct.pack("<H" if version == 1 else "<I", len(header))
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + size + header.encode() + data)
    return path


def test_an_array_in_fortran_order_is_read_as_it_was_meant(tmp_path):
    """cnpy#7, tract#655: 'fortran_order': True was overlooked, or its rows exchanged."""
    x = draw(3, 5)
    np.save(tmp_path / "x.npy", np.asfortranarray(x))
    assert b"'fortran_order': True" in (tmp_path / "x.npy").read_bytes()[:128]
    assert read(tmp_path, tmp_path / "x.npy", x)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_headers_of_every_version_and_length_are_read(version, tmp_path):
    """cnpy#77: lengths of versions 2 and 3 were read in two bytes. cnpy#85: a header of more than 256 bytes."""
    x = draw(4, 6)
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 6), }"
    for padding in (20, 300, 60_000):
        file = with_header(tmp_path / "x.npy", header + " " * padding + "\n", x.tobytes(), version)
        assert read(tmp_path, file, x)


def test_the_other_byte_order_is_swapped_or_refused_never_misread(tmp_path):
    """NpyCpp#2: big-endian numbers were taken as they lay."""
    x = draw(3, 4)
    np.save(tmp_path / "x.npy", x.astype(">f4"))
    found = attend(tmp_path, *3 * [tmp_path / "x.npy"])
    assert "big-endian" in found if isinstance(found, str) else np.array_equal(found, headway.attention(x, x, x))


def test_a_scalar_is_refused_by_its_shape(tmp_path):
    """NumSharp#517: shape () ended in an index out of range."""
    np.save(tmp_path / "x.npy", np.float32(3))
    assert "()" in attend(tmp_path, *3 * [tmp_path / "x.npy"])


def test_numbers_are_written_without_a_locale_s_separators(tmp_path):
    """libnpy#37: a locale wrote the shape 2,621 for 2621, which reads as two axes."""
    np.save(tmp_path / "q.npy", draw(2621, 2))
    np.save(tmp_path / "k.npy", draw(3, 2, seed=1))
    sources = [tmp_path / name for name in ("q.npy", "k.npy", "k.npy")]
    assert attend(tmp_path, *sources, LC_ALL="de_DE.UTF-8", LC_NUMERIC="en_US.UTF-8").shape == (2621, 2)


def test_a_shape_that_no_file_can_hold_is_refused(tmp_path):
    """cnpy#98, cnpy#72: sizes were read in 32 bits, and a count of 0 bytes crashed."""
    for shape in ("(4294967298, 2)", "(4611686018427387904, 4)", "(99999999999999999999, 1)", "(-1, 2)"):
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n"
        found = attend(tmp_path, *3 * [with_header(tmp_path / "x.npy", header, draw(2, 2).tobytes())])
        assert isinstance(found, str) and "x.npy" in found
    np.savez(tmp_path / "x.npz", x=np.zeros((0, 4), np.float32), y=draw(3, 4))
    assert attend(tmp_path, f"{tmp_path}/x.npz:x", f"{tmp_path}/x.npz:y", f"{tmp_path}/x.npz:y").shape == (0, 4)


# ---- .safetensors ----


def safetensors(path, header, data=b""):
    """A file with this header, an object or the text of one."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return f"{path}:x"


def entry(x, begin=0):
    return {"dtype": "F32", "shape": list(x.shape), "data_offsets": [begin, begin + x.nbytes]}


def test_a_name_that_occurs_twice_in_a_header_is_refused(tmp_path):
    """safetensors#401: the error spoke of offsets; other readers take the last one, which may be somebody else's."""
    x = draw(2, 3)
    first, second = json.dumps(entry(x)), json.dumps(entry(x, x.nbytes))
    source = safetensors(tmp_path / "a.safetensors", f'{{"x": {first}, "x": {second}}}', 2 * x.tobytes())
    found = attend(tmp_path, source, source, source)
    assert isinstance(found, str) and "x" in found and "a.safetensors" in found


@pytest.mark.parametrize("metadata", [{}, {"format": "np"}])
def test_metadata_may_be_empty(metadata, tmp_path):
    """fastsafetensors#89: an empty __metadata__ was taken for a tensor without offsets."""
    x = draw(2, 3)
    header = {"__metadata__": metadata, "x": entry(x)}
    assert read(tmp_path, safetensors(tmp_path / "a.safetensors", header, x.tobytes()), x)


def test_a_file_of_metadata_alone_is_a_file_without_the_tensor(tmp_path):
    """safetensors#601: a file without tensors was taken for a damaged one."""
    source = safetensors(tmp_path / "a.safetensors", {"__metadata__": {"crc": "12"}})
    assert "x" in attend(tmp_path, source, source, source)


def test_tensors_of_size_0_are_read(tmp_path):
    """safetensors#442: a buffer of length 0 was an error in one of two ways to load the same file."""
    empty, x = np.zeros((0, 3), np.float32), draw(2, 3)
    file = tmp_path / "a.safetensors"
    safetensors(file, {"e": entry(empty), "x": entry(x)}, x.tobytes())
    assert attend(tmp_path, f"{file}:e", f"{file}:x", f"{file}:x").shape == (0, 3)
    assert not attend(tmp_path, f"{file}:x", f"{file}:e", f"{file}:e").any()


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    """vmlx-swift#217, ComfyUI#14989: what was missing read as zeros or garbage, or failed without naming the cause."""
    x = draw(4, 6)
    for missing in (1, 40, x.nbytes):
        source = safetensors(tmp_path / "a.safetensors", {"x": entry(x)}, x.tobytes()[:-missing])
        found = attend(tmp_path, source, source, source)
        assert isinstance(found, str) and "a.safetensors" in found


def test_offsets_must_hold_what_the_shape_says(tmp_path):
    """fak#12603, safetensors#95: a tensor with fewer bytes than its shape was accepted, and read past its end."""
    x = draw(4, 6)
    shapes = [[16, 6], [2**62, 8], [4, 6, -1]]
    offsets = [[96, 0], [0, 2**63]]
    for wrong in [{"shape": sizes} for sizes in shapes] + [{"data_offsets": pair} for pair in offsets]:
        source = safetensors(tmp_path / "a.safetensors", {"x": entry(x) | wrong}, x.tobytes())
        found = attend(tmp_path, source, source, source)
        assert isinstance(found, str) and "a.safetensors" in found


def test_a_header_that_claims_to_be_enormous_is_refused(tmp_path):
    """safetensors#668: the length in front of the header has a limit; one beyond the file must not be allocated."""
    for size in (2**63, 2**64 - 1, 10**9):
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", size) + b"{}")
        source = f"{tmp_path}/a.safetensors:x"
        assert "a.safetensors" in attend(tmp_path, source, source, source)
