"""Reading of untrusted files within bounds of memory and time; all failures raise a BlockSparseError."""

from __future__ import annotations

import errno
import gzip
import io
import json
import math
import os
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from .errors import BlockSparseError

# Characters per line or row of a csv file; a tenth of it holds 65,536 numbers of 17 digits.
MAX_IN_A_LINE = 1 << 24
# Empty lines per text. A few gzipped bytes can hold billions of them, which take minutes to skip.
MAX_EMPTY = 1_000_000
# Files per archive; aclImdb has 100,000.
MAX_MEMBERS = 1_000_000
# Bytes per JSON file.
MAX_JSON = 1 << 24
GIB = 1 << 30


def first_existing(name: str, folder: Any, *candidates: str) -> Path:
    """Return the first of several paths in a folder that exists.

    Raises:
        BlockSparseError: none exists, or the folder is not a path.
    """
    paths = [path_of("data_dir", folder) / candidate for candidate in candidates]
    for path in paths:
        if os.path.exists(path):  # Path.exists raises for names that are too long
            return path
    raise BlockSparseError.expected(name, " or ".join(map(str, paths)), "neither" if len(paths) == 2 else "none")


def path_of(name: str, value: Any) -> Path:
    """Return the argument `name` as a path, or raise a BlockSparseError if it is not one."""
    try:
        path = Path(value)
    except TypeError as error:
        raise BlockSparseError.expected(name, "a path", repr(value)) from error
    if "\0" in str(path):
        raise BlockSparseError.expected(name, "a path", repr(value))
    return path


def writable_folder(name: str, value: Any) -> Path:
    """Return the argument `name` as a folder that files can be written to; create it if it does not exist.

    Raises:
        BlockSparseError: not a path, or a folder that cannot be created or written to.
    """
    folder = path_of(name, value)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        got = f"{folder} ({error.strerror or error})"
        raise BlockSparseError.expected(name, "a folder to write to", got) from error


@contextmanager
def opened(path: Any, subject: str, *, gzipped: bool = False) -> Iterator[BinaryIO]:
    """Open a file to read bytes; errors while reading inside the `with` become a BlockSparseError.

    Args:
        path: the file; folders, pipes and devices are refused.
        subject: the subject of the error.
        gzipped: if True and the file starts as gzip files do, unpack it, up to `most_unpacked` bytes.

    Raises:
        BlockSparseError: the file does not exist, cannot be read or unpacked, or unpacks to too many bytes.
    """
    path = path_of(subject, path)
    try:
        with _stream(path, gzipped) as file:
            yield file
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        reason = "more than fits into the memory" if isinstance(error, MemoryError) else error
        raise BlockSparseError.expected(
            subject, "a readable file", f"{path}: {getattr(error, 'strerror', None) or reason}"
        ) from error


def read(path: Any, subject: str) -> bytes:
    """Return all bytes of a file; errors as `opened`."""
    with opened(path, subject) as file:
        return file.read()


def lines(path: Any, subject: str, encoding: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text, gzipped or not, with their numbers from 1.

    Raises:
        BlockSparseError: as `opened`; also for a line of more than 16 Mi characters or more than a million empty lines.
        UnicodeDecodeError: a byte is invalid in the encoding.
    """
    with opened(path, subject, gzipped=True) as file, io.TextIOWrapper(file, encoding=encoding, newline="") as text:
        number = empty = 0
        while line := text.readline(MAX_IN_A_LINE):
            number += 1
            if len(line) == MAX_IN_A_LINE and line[-1] not in "\r\n":
                expected = f"fewer than {MAX_IN_A_LINE:,} characters"
                raise BlockSparseError.expected(f"{path}, line {number}", expected, "more")
            empty += len(line) < 3 and line.isspace()
            if empty > MAX_EMPTY:
                raise BlockSparseError.expected(str(path), f"at most {MAX_EMPTY:,} empty lines", "more")
            yield number, line


def read_json(path: Any, subject: str) -> Any:
    """Read a JSON file of at most 16 MiB.

    Raises:
        BlockSparseError: as `opened`; also for a larger file or one that is not JSON.
    """
    with opened(path, subject) as file:
        data = file.read(MAX_JSON + 1)
    if len(data) > MAX_JSON:
        raise BlockSparseError.expected(str(path), f"a JSON file of at most {MAX_JSON:,} bytes", "more")
    try:
        return json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise BlockSparseError.expected(str(path), "a JSON file", error) from error


def most_unpacked(packed: int) -> int:
    """Return the maximum number of bytes that `packed` bytes are unpacked to.

    It is the larger of 2 GiB and eight times the packed bytes (HIGGS.csv.gz needs these), or the environment variable
    BLOCKSPARSE_MAX_UNPACKED, in GiB.

    >>> from blocksparse.files import most_unpacked
    >>> most_unpacked(10**6) == 2 * 2**30, most_unpacked(10**9) == 8 * 10**9
    (True, True)
    """
    setting = os.environ.get("BLOCKSPARSE_MAX_UNPACKED")
    if not setting:
        return max(2 * GIB, 8 * packed)
    try:
        size = float(setting)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise BlockSparseError.expected("BLOCKSPARSE_MAX_UNPACKED", "a positive number of GiB", repr(setting))
    return int(size * GIB)


def check_unpacked(subject: str, size: int, packed: int) -> None:
    """Raise a BlockSparseError if `packed` bytes unpack to more than the maximum."""
    most = most_unpacked(packed)
    if size > most:
        expected = f"at most {most / GIB:.3g} GiB unpacked (to allow more, set BLOCKSPARSE_MAX_UNPACKED, in GiB)"
        raise BlockSparseError.expected(subject, expected, "more")


# Errors of a member whose name is invalid or used by another member.
_NAME_ERRORS = {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a `.zip` or `.tar.gz` of files and folders into a folder.

    Raises:
        BlockSparseError: the archive is broken, has more than a million files, links, devices or names that lead out of
            the folder, or unpacks to too many bytes.
        OSError: the archive cannot be read, or the folder cannot be written to.
    """
    try:
        (_unzip if archive.suffix == ".zip" else _untar)(archive, folder)
    except BlockSparseError:
        raise
    except Exception as error:  # a broken archive can raise anything
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            # If archive and folder exist, the error is due to a member's name.
            is_name = error.errno in _NAME_ERRORS and archive.is_file() and folder.is_dir()
            if not is_name:
                raise
        got = f"a broken archive ({type(error).__name__}: {error})"
        raise BlockSparseError.expected(archive.name, "a whole archive", got) from error


def _unzip(archive: Path, folder: Path) -> None:
    """Unpack a zip archive after checks of its members and sizes."""
    packed = archive.stat().st_size
    with zipfile.ZipFile(archive) as file:
        members = file.infolist()
        _check_members(archive, len(members))
        # Python unpacks no member to more than its stated size.
        check_unpacked(archive.name, sum(member.file_size for member in members), packed)
        for member in members:
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise zipfile.BadZipFile(f"method {member.compress_type}, neither stored nor deflated")
        file.extractall(folder)


def _untar(archive: Path, folder: Path) -> None:
    """Unpack a tar archive, gzipped or not; refuse links, and members outside of the folder."""
    packed, total = archive.stat().st_size, 0
    with _stream(archive, gzipped=True) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        for count, member in enumerate(tar, 1):
            _check_members(archive, count)
            total += member.size
            check_unpacked(archive.name, total, packed)
            # After a size below 0 the next header would come before this one.
            if not (member.isfile() or member.isdir()) or member.issparse() or member.size < 0:
                raise tarfile.ExtractError(f"{member.name[:100]} is neither a plain file nor a folder")
            tar.extract(member, folder, filter="data")


def _check_members(archive: Path, count: int) -> None:
    """Refuse an archive with too many files."""
    if count > MAX_MEMBERS:
        raise BlockSparseError.expected(archive.name, f"at most {MAX_MEMBERS:,} files", "more")


def _stream(path: Path, gzipped: bool) -> BinaryIO:
    """Open a regular file for reading; with `gzipped`, decompress it if it is a gzip file."""
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a zero byte in its name
        raise OSError(errno.ENOENT, str(error)) from error
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):  # reading a pipe would block
        raise OSError(errno.EINVAL, "neither a file nor a link to one")
    file = open(path, "rb")  # noqa: SIM115
    if not gzipped or file.peek(2)[:2] != b"\x1f\x8b":
        return file
    return io.BufferedReader(_Gunzipped(path, file), 1 << 17)


class _Gunzipped(io.RawIOBase):
    """The unpacked bytes of a gzip file, up to the maximum."""

    def __init__(self, path: Path, packed: BinaryIO):
        self.path = path
        self.packed = packed
        self.size = os.fstat(packed.fileno()).st_size
        self.file = gzip.GzipFile(fileobj=packed)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.file.read(len(buffer))
        buffer[: len(data)] = data
        self._check(self.file.tell())
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._check(offset)
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def _check(self, size: int) -> None:
        """Refuse a file that unpacks to too many bytes."""
        check_unpacked(str(self.path), size, self.size)

    def close(self) -> None:
        if not self.closed:
            self.file.close()
            self.packed.close()
        super().close()
