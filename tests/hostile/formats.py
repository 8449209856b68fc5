"""Formats that readers accept: small valid files, the reader, and malicious files of each.

A new reader joins `FORMATS`.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from blocksparse import files
from blocksparse.ops.gpu import tiles
from blocksparse.ops.gpu.tiles import Gpu, Work
from blocksparse_lab.data import cifar10, corpora, idx, planetoid, reviews, tables

MIB = 1 << 20


@dataclass(frozen=True)
class Format:
    """A format.

    Args:
        read: reads the files in a folder.
        valid: content of the files by name; the first one is mutated.
        hostile: malicious contents of the first file.
    """

    read: Callable[[Path], object]
    valid: Mapping[str, bytes]
    hostile: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return next(iter(self.valid))


# -- idx and csv -------------------------------------------------------------------------------------------------


def idx_bytes(shape: tuple[int, ...], data: bytes, code: int = 8) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, code, len(shape), *shape) + data


def corrupt(packed: bytes) -> bytes:
    """Give a gzip file a first block of an unknown kind."""
    return packed[:10] + b"\xff" + packed[11:]


def bomb(start: bytes = b"", size: int = 4 * MIB, of: bytes = b"0") -> bytes:
    """Gzip a start followed by `size` more bytes."""
    packer = zlib.compressobj(9, wbits=31)
    parts = [packer.compress(start)]
    parts += [packer.compress(of * (MIB // len(of))) for _ in range(size // MIB)]
    return b"".join([*parts, packer.flush()])


IMAGES = idx_bytes((4, 3, 3), bytes(range(36)))
IDX = {
    "255 dimensions": idx_bytes((1,) * 255, b"x"),
    "a product that wraps to 0": idx_bytes((2**31, 2**31, 4), b""),
    "a product that wraps to 4": idx_bytes((2**31 + 1, 2**31 + 1, 2**2), b"1234"),
    "none, of many": idx_bytes((0, *(2**32 - 1,) * 7), b""),
    "no dimension": idx_bytes((), b"x"),
    "more data than stated": idx_bytes((1,), bytes(MIB)),
    "gzip of no kind": corrupt(gzip.compress(IMAGES)),
    "gzip cut short": gzip.compress(IMAGES)[:-9],
    "gzip with another sum": gzip.compress(IMAGES)[:-8] + b"12345678",
    "gzip of gzip": gzip.compress(gzip.compress(IMAGES)),
    "a bomb": bomb(idx_bytes((4, 3, 3), b"")),
    "a bomb that says so": bomb(idx_bytes((4 * MIB,), b"")),
}

TABLE = b"x,y,label\n1,2.5,a\n-3e2,4,b\n5,6,a\n7,8,b\n"
CSV = {
    "underscores": b"x,label\n1_0,a\n2,b\n",
    "other digits": "x,label\n\u0661,a\n2,b\n".encode(),
    "hexadecimal": b"x,label\n0x10,a\n2,b\n",
    "a large exponent": b"x,label\n1e999999999,a\n2,b\n",
    "zero bytes": b"x,label\n1\0,a\n2,b\n",
    "infinity": b"x,label\ninfinity,a\n2,b\n",
    "UTF-16": "x,label\n1,a\n2,b\n".encode("utf-16"),
    "Latin-1": "x,label\n1,\u00e9\n2,b\n".encode("latin1"),
    "an open quote": b'x,label\n1,"a\n2,b\n',
    "a long field": b"x,label\n" + b"1" * 200_000 + b",a\n",
    "a number of 100,000 digits": b"x,label\n" + b"1" * 100_000 + b",a\n",
    "a long line": b"x,label\n" + b"1," * (2 * MIB // 2),
    "a long row of many lines": b'x,label\n1,"\n",' + b'"\n",' * (2 * MIB // 4),
    "many columns": b"," * MIB + b"label\n",
    "a bomb of one line": bomb(b"x,label\n"),
    "a bomb of empty lines": bomb(b"x,label\n", of=b"\n"),
    "a bomb of rows": bomb(b"x,label\n", of=b"1,a\n2,b\n"),
    "gzip of no kind": corrupt(gzip.compress(TABLE)),
    "classes by the thousand": b"x,label\n" + b"".join(b"1,%d\n" % i for i in range(60_000)),
    "words by the thousand": b"x,label\n" + b"".join(b"1,w%d\n" % i for i in range(60_000)),
}

SENTENCES = b"label,sentence\n" + b"".join(b"%d,text number %d\n" % (i % 2, i) for i in range(40))
REVIEWS = {
    "an open quote": b'label,text\n1,"a\n0,b\n',
    "a long row of many lines": b'label,text\n1,"\n",' + b'"\n",' * (2 * MIB // 4),
    "zero bytes": SENTENCES + b"1,\0\n",
    "UTF-16": SENTENCES.decode().encode("utf-16"),
    "three classes": SENTENCES + b"2,x\n",
    "entities": b"label,text\n" + b"&#99999999999;,1\n" * 50,
    "a label of 100,000 digits": b"label,text\n" + b"1" * 100_000 + b",a\n",
}

# -- pickles -----------------------------------------------------------------------------------------------------

NESTED = b"\x80\x02" + b"(" * 500_000
PICKLES = {
    "a nested key": b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",
    "a key of 2^100 parts": b"]("
    + b")q\x00"
    + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(100))
    + b"}hdK\x01se.",
    "lists in lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "marks in marks": NESTED + b"t" * 500_000 + b".",
    "a memo that doubles": b"\x80\x02]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(100)) + b".",
    "a memo of 4 G": b"\x80\x02Nr\xff\xff\xff\xff.",
    "a text of 1 T": b"\x80\x04\x8e" + struct.pack("<Q", 10**12) + b"x.",
    "bytes of 1 T": b"\x80\x05\x96" + struct.pack("<Q", 10**12) + b"x.",
    "a frame of 1 T": b"\x80\x04\x95" + struct.pack("<Q", 10**12) + b"N.",
    "a number of 100,000 digits": b"L" + b"9" * 100_000 + b"L\n.",
    "millions of lists": b"\x80\x02(" + b"]" * (MIB) + b"l.",
    "a program": b"cos\nsystem\n(S'exit 1'\ntR.",
    "a program's class": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "an array that demands 1 T": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x8a\x06"
    + (10**12).to_bytes(6, "little")
    + b"\x85U\x01b\x87R.",
    "a dict that grows": b"\x80\x02ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R.",
    "a dict that calls": b"\x80\x02ccollections\ndefaultdict\nc__builtin__\neval\n\x85R.",
    "nothing": b".",
    "too little on the stack": b"\x80\x020000aseub.",
}


def array_pickle(shape: tuple[int, ...], dtype: str, data: bytes, order: str = "<") -> bytes:
    """Pickle an array as Python 2 did, with parts that need not fit."""
    shape_part = b"(" + b"".join(b"\x8a\x09" + n.to_bytes(9, "little", signed=True) for n in shape) + b"t"
    dtype_part = b"cnumpy\ndtype\nU" + bytes([len(dtype)]) + dtype.encode() + b"K\x00K\x01\x87R"
    dtype_part += b"(K\x03U\x01" + order.encode() + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    head = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    return head + b"(K\x01" + shape_part + dtype_part + b"\x89T" + struct.pack("<i", len(data)) + data + b"tb"


ARRAYS = {
    "more numbers than bytes": array_pickle((10**9, 10**9), "i4", b"1234"),
    "a product that wraps": array_pickle((2**62, 4), "i4", b""),
    "negative sizes": array_pickle((-1, -4), "u1", b"1234"),
    "objects": array_pickle((1,), "O8", b"12345678"),
    "records": array_pickle((1,), "V8", b"12345678"),
    "dates": array_pickle((1,), "M8", b"12345678"),
    "an unknown order": array_pickle((1,), "i4", b"1234", "?"),
    "1,000 dimensions": array_pickle((1,) * 1000, "u1", b"1"),
    "none, of many": array_pickle((0, 2**62), "f4", b""),
}
PLAIN_PICKLES = PICKLES | {name: b"\x80\x02" + made + b"." for name, made in ARRAYS.items()}


def python2(made: object) -> bytes:
    return pickle.dumps(made, 2).replace(b"numpy._core", b"numpy.core")


BATCH = {"data": np.arange(3 * 3072, dtype=np.uint32).astype(np.uint8).reshape(3, 3072), "labels": [1, 9, 0]}
CIFAR10 = PLAIN_PICKLES | {
    name: b"\x80\x02}(U\x04data" + made + b"U\x06labels](K\x01K\x02eu." for name, made in ARRAYS.items()
}
CIFAR10 |= {
    "labels that hold themselves": b"\x80\x02}(U\x04data"
    + array_pickle((1, 3072), "u1", bytes(3072))
    + b"U\x06labels]q\x00h\x00au.",
}


def csr(indptr: bytes, indices: bytes, shape: tuple[int, int], data: bytes) -> bytes:
    """Pickle a sparse matrix as scipy does; the indices are int32, the values float32."""
    parts = {"indptr": (indptr, "i4"), "indices": (indices, "i4"), "data": (data, "f4")}
    made = b"\x80\x02cscipy.sparse.csr\ncsr_matrix\n)\x81}("
    made += b"U\x06_shape" + b"".join(b"\x8a\x09" + n.to_bytes(9, "little", signed=True) for n in shape) + b"\x86"
    for name, (bytes_, dtype) in parts.items():
        made += b"U" + bytes([len(name)]) + name.encode() + array_pickle((len(bytes_) // 4,), dtype, bytes_)
    return made + b"ub."


def ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


ONES = struct.pack("<2f", 1, 1)
WORDS = csr(ints(0, 1, 2), ints(0, 4), (2, 5), ONES)
PLANETOID = {
    "ind.cora.allx": WORDS,
    "ind.cora.ally": python2(np.eye(2, dtype=np.int32)),
    "ind.cora.tx": csr(ints(0, 1, 2), ints(1, 2), (2, 5), ONES),
    "ind.cora.ty": python2(np.eye(2, dtype=np.int32)),
    "ind.cora.graph": python2({node: [(node + 1) % 4] for node in range(4)}),
    "ind.cora.test.index": b"3\n2\n",
}
ALLX = PLAIN_PICKLES | {
    "an index far outside": csr(ints(0, 1, 2), ints(0, 2**31 - 1), (2, 5), ONES),
    "an index below 0": csr(ints(0, 1, 2), ints(0, -(2**30)), (2, 5), ONES),
    "bounds far outside": csr(ints(0, 1, 2**31 - 1), ints(0, 1), (2, 5), ONES),
    "bounds that go down": csr(ints(0, 2**30, 2), ints(0, 1), (2, 5), ONES),
    "bounds below 0": csr(ints(-(2**30), 0, 2), ints(0, 1), (2, 5), ONES),
    "too few bounds": csr(ints(0, 2), ints(0, 1), (2, 5), ONES),
    "fewer numbers than indices": csr(ints(0, 1, 2), ints(0, 1), (2, 5), ONES[:4]),
    "many columns": csr(ints(0, 1, 2), ints(0, 1), (2, 2**62), ONES),
    "many rows": csr(ints(0, 1, 2), ints(0, 1), (2**62, 5), ONES),
    "negative rows": csr(ints(0, 1, 2), ints(0, 1), (-2, 5), ONES),
    "a number that is none": csr(ints(0, 1, 2), ints(0, 1), (2, 5), struct.pack("<2f", np.nan, 1)),
}
GRAPHS = PLAIN_PICKLES | {
    "a list of all nodes": b"\x80\x02}(K\x00]("
    + b"K\x01" * 4000
    + b"eq\x00"
    # Each of 4000 nodes has the same 4000 neighbours, in two bytes.
    + b"".join(b"M" + struct.pack("<H", i) + b"h\x00" for i in range(1, 4000))
    + b"u.",
    "a node far outside": python2({0: [10**15], 1: [0], 2: [0], 3: [0]}),
    "a node below 0": python2({0: [-3], 1: [0], 2: [0], 3: [0]}),
    "no node": python2({}),
    "words for nodes": python2({"a": ["b"]}),
    "lists of lists": python2({0: [[[1]]]}),
}
INDICES = {
    "a node below 0": b"3\n-2\n",
    "a node twice": b"3\n3\n",
    "a node far outside": b"3\n" + b"9" * 18,
    "5,000 digits": b"9" * 5000,
    "underscores": b"3\n0_2",
    "other digits": "3\n\u0662".encode(),
}

# -- tiles -------------------------------------------------------------------------------------------------------

GPU = Gpu("NVIDIA H200", "sm90", 132, 227 * 1024)
WORK = Work("forward", torch.bfloat16, (32, 32), 8192, 0.1)
ENTRY = {
    "pass": "forward",
    "dtype": "bfloat16",
    "block": [32, 32],
    "tokens": 8192,
    "density": 0.1,
    "tile": {"block_m": 64, "block_n": 32, "block_k": 64, "warps": 4, "stages": 3, "group_m": 1, "pairs": False},
}
ODD = (0, -1, -(2**40), 10**30, 0.5, 1e308, "32", "", None, True, [], {}, [32], {"a": 1})


def tiles_of(*entries: object) -> bytes:
    return json.dumps({"gpu": {}, "tiles": entries}).encode()


def _odd_tiles() -> dict[str, bytes]:
    found = {}
    for value in ODD:
        for name in ENTRY:
            found[f"{name} {value!r}"] = tiles_of(ENTRY | {name: value})
        for name in ENTRY["tile"]:
            found[f"tile's {name} {value!r}"] = tiles_of(ENTRY | {"tile": ENTRY["tile"] | {name: value}})
    for name in ENTRY:
        found[f"no {name}"] = tiles_of({key: value for key, value in ENTRY.items() if key != name})
    return found


TILES = {
    **_odd_tiles(),
    "100,000 lists": b'{"tiles": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "100,000 dicts": b'{"a":' * 100_000,
    "a number of 100,000 digits": b'{"tiles": [' + b"9" * 100_000 + b"]}",
    "no numbers": tiles_of(ENTRY).replace(b"0.1", b"NaN"),
    "an infinite number": tiles_of(ENTRY).replace(b"0.1", b"1e999"),
    "a million lists": b'{"tiles": [' + b"[]," * MIB + b"[]]}",
    "UTF-16": tiles_of(ENTRY).decode().encode("utf-16"),
    "half a surrogate pair": tiles_of(ENTRY | {"pass": "\ud800"}),
    "Latin-1": b'{"tiles": "\xe9"}',
    "another dtype": tiles_of(ENTRY | {"dtype": "nn"}),
    "more of a tile": tiles_of(ENTRY | {"tile": ENTRY["tile"] | {"__class__": 1}}),
}


def _read_tiles(folder: Path) -> object:
    """Read the tiles and choose one for a work, which must succeed with any tiles that were read."""
    return tiles.fit(tiles.nearest(WORK, tiles.read(folder / "tiles.json")) or tiles.rule(WORK, GPU), WORK, GPU)


# -- archives ----------------------------------------------------------------------------------------------------


def tarred(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return gzip.compress(out.getvalue())


def entry(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **more: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def lying(size: int) -> bytes:
    """Make a tar whose only member claims more bytes than there are."""
    info, _ = entry("a")
    info.size = size
    return gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))


TARS = {
    "a name that leads out": tarred(entry("../outside", b"x")),
    "a name from the root": tarred(entry("/tmp/outside-of-blocksparse", b"x")),
    "a link that leads out": tarred(entry("a", kind=tarfile.SYMTYPE, linkname="/etc"), entry("a/outside", b"x")),
    "a hard link": tarred(entry("a", kind=tarfile.LNKTYPE, linkname="/etc/passwd")),
    "a device": tarred(entry("a", kind=tarfile.CHRTYPE, devmajor=1, devminor=5)),
    "a pipe": tarred(entry("a", kind=tarfile.FIFOTYPE)),
    "8 GiB that are not there": lying(8 << 30),
    "a size below 0": lying(-(1 << 20)),
    "2^60 bytes": lying(1 << 60),
    "a time that is none": tarred(entry("a", mtime=1e300), form=tarfile.PAX_FORMAT),
    "a bomb": bomb(entry("a", bytes(4 * MIB))[0].tobuf(), of=b"\0"),
    "a header that is a bomb": bomb(entry("a", bytes(4 * MIB), tarfile.XHDTYPE)[0].tobuf()),
    "a folder over a file": tarred(entry("a", b"x"), entry("a/b", b"x")),
    "a file over a folder": tarred(entry("a/b", b"x"), entry("a", b"x")),
    "no name": tarred(entry(".", b"x")),
    "itself again": lying(-512),
    "gzip of no kind": corrupt(tarred(entry("a", b"x"))),
    "no gzip": b"x" * 10_000,
    "a long name": tarred(entry("a" * 5000, b"x")),
}


def zipped(data: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in data.items():
            archive.writestr(name, content)
    return out.getvalue()


ZIP = zipped({"a": b"some text " * 20, "b/c": b"more"})


def _bomb_of_a_zip() -> bytes:
    with io.BytesIO() as out:
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a", "w") as member:
            for _ in range(4):
                member.write(bytes(MIB))
        return out.getvalue()


ZIPS = {
    "a name that leads out": zipped({"../../outside": b"x"}),
    "a method of its own": zipped({"a": b"x" * 100}, zipfile.ZIP_LZMA),
    "a corrupt block": ZIP[:31] + b"\xff\xff\xff" + ZIP[34:],
    "a method that is not there": ZIP.replace(b"\x08\x00", b"\x63\x00"),
    "a lock": ZIP.replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01"),
    "a directory of 4 GiB": ZIP[:-10] + b"\xff\xff\xff\xff" + ZIP[-6:],
    "a bomb": _bomb_of_a_zip(),
    "a file under a file": zipped({"a": b"x", "a/b": b"x"}),
    "a long name": zipped({"a" * 5000: b"x"}),
}


def _unpack(name: str) -> Callable[[Path], object]:
    def unpack(folder: Path) -> None:
        target = folder / "unpacked"
        target.mkdir()
        try:
            files.unpack(folder / name, target)
        except OSError:
            return  # as documented; `download.fetch` reports it
        finally:
            # Nothing may appear next to the existing files.
            beside = {path.name for path in folder.iterdir()} - {name, "unpacked"}
            if beside or any(path.is_symlink() for path in target.rglob("*")):
                raise RuntimeError(f"unpacked to {beside or 'a link'}")

    return unpack


# -- all of them -------------------------------------------------------------------------------------------------


def _planetoid(part: str, hostile: Mapping[str, bytes]) -> Format:
    name = f"ind.cora.{part}"
    return Format(lambda folder: planetoid.load("cora", folder), {name: PLANETOID[name], **PLANETOID}, hostile)


MADELON = {
    "madelon_train.data": b"".join(b"%d " % i * 500 + b"\n" for i in range(2)),
    "madelon_train.labels": b"1\n-1\n",
}
FORMATS = (
    Format(lambda folder: idx.read(folder / "idx"), {"idx": IMAGES}, IDX),
    Format(lambda folder: idx.read(folder / "idx.gz"), {"idx.gz": gzip.compress(IMAGES, mtime=0)}, IDX),
    Format(lambda folder: tables.load(folder / "table.csv"), {"table.csv": TABLE}, CSV),
    # The files of CSV would be read as above: whether a file is gzipped is decided by its first bytes.
    Format(lambda folder: tables.load(folder / "table.csv.gz"), {"table.csv.gz": gzip.compress(TABLE, mtime=0)}, {}),
    Format(lambda folder: reviews.load(folder / "reviews.csv"), {"reviews.csv": SENTENCES}, REVIEWS | CSV),
    Format(
        lambda folder: reviews.load("imdb", folder),
        {
            f"aclImdb/{part}/{kind}/{n}_{n}.txt": b"Not bad &amp; caf\xc3\xa9."
            for part in ("train", "test")
            for kind in ("neg", "pos")
            for n in range(3)
        },
        {"no UTF-8": b"caf\xe9", "half a surrogate": b"\xed\xa0\x80", "nothing": b"", "many lines": b"\n" * MIB},
    ),
    Format(
        lambda folder: tables.read_madelon(folder / "madelon_train.data"),
        MADELON,
        {"a byte of its own": b"\xff", "a long line": b"1 " * (2 * MIB // 2), "underscores": b"1_0 " * 500},
    ),
    Format(lambda folder: cifar10.read_batch(folder / "data_batch_1"), {"data_batch_1": python2(BATCH)}, CIFAR10),
    Format(
        lambda folder: cifar10.read_batch(folder / "data_batch_5"), {"data_batch_5": pickle.dumps(BATCH, 5)}, CIFAR10
    ),
    _planetoid("allx", ALLX),
    _planetoid("ally", PLAIN_PICKLES),
    _planetoid("graph", GRAPHS),
    _planetoid("test.index", INDICES),
    Format(_read_tiles, {"tiles.json": tiles_of(ENTRY)}, TILES),
    Format(_unpack("set.tar.gz"), {"set.tar.gz": tarred(entry("a", b"x" * 100), entry("b/c", b"y"))}, TARS),
    Format(_unpack("set.zip"), {"set.zip": ZIP}, ZIPS),
    Format(lambda folder: corpora.load("text", folder), {"text": b"Some words."}, {"nothing": b""}),
)
