"""Download data sets once, check and unpack them, and keep them in the user's cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from blocksparse import files
from blocksparse.errors import BlockSparseError

# Called with bytes so far and in all (0 if the server does not say).
Progress = Callable[[int, int], None]


def cache() -> Path:
    """Return the folder for downloads: BLOCKSPARSE_DATA, or the platform's cache folder."""
    import pooch

    # Path.expanduser raises its own errors for unknown users.
    return Path(os.path.expanduser(os.environ.get("BLOCKSPARSE_DATA") or pooch.os_cache("blocksparse"))).absolute()


def fetch(url: str, known_hash: str, name: str, progress: Progress | None = None) -> Path:
    """Download a file, or an archive (`.zip`, `.tar.gz`) to a folder, unless it is cached; return the path.

    A file with a wrong checksum is removed, and a folder appears only once the whole archive is unpacked.

    Args:
        url: http or https.
        known_hash: for pooch, "sha256:..." or "md5:...".
        name: path of the file or folder in the cache.
        progress: called after each chunk with bytes so far and in all.

    Raises:
        BlockSparseError: no connection, a wrong checksum, an archive that is broken or that `files.unpack` refuses, or
            a full disk.
    """
    target = cache() / name
    if os.path.exists(target):
        return target
    archive = url.endswith((".zip", ".tar.gz"))
    path = target.with_name(url.rsplit("/", 1)[1]) if archive else target
    try:
        _download(url, known_hash, path, progress)
        if archive:
            _unpack(path, target)
            path.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        # requests raises OSErrors; pooch's error for a wrong checksum is a ValueError, as are ours.
        raise BlockSparseError.expected(
            name,
            f"a download from {url} to {target.parent}, or a folder with the files as --data-dir",
            _reason(error, url),
        ) from error
    return target


def located(
    name: str,
    places: Sequence[str],
    data_dir: str | Path | None,
    url: str | None = None,
    known_hash: str = "",
    progress: Progress | None = None,
) -> Path:
    """Return the first existing one of `places` in a folder, or in a download if there is no folder.

    Raises:
        BlockSparseError: there is none, there is no download, or as for `fetch`.
    """
    if data_dir is None and url is None:
        wanted = f"--data-dir, a folder with {' or '.join(places)}: it has no download"
        raise BlockSparseError.expected(name, wanted, "none")
    if data_dir is None:
        data_dir = fetch(str(url), known_hash, name, progress)
        if not data_dir.is_dir():
            return data_dir
    return files.first_existing(name, data_dir, *places)


def _download(url: str, known_hash: str, path: Path, progress: Progress | None) -> None:
    """Download a file by pooch, which checks its hash."""
    import pooch

    pooch.get_logger().setLevel("WARNING")
    downloader = pooch.HTTPDownloader(progressbar=_Bar(progress) if progress else False)
    pooch.retrieve(url, known_hash, fname=path.name, path=path.parent, downloader=downloader)


def _unpack(archive: Path, target: Path) -> None:
    """Unpack an archive to a folder that appears only when complete."""
    # Rename at the end, so that half an archive is never taken for the data set.
    with tempfile.TemporaryDirectory(prefix=f"{target.name}-", dir=target.parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        files.unpack(archive, folder)
        folder.chmod(0o755)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # another process was faster
                raise


class _Bar:
    """Adapts `progress` to the progress bar that pooch expects."""

    def __init__(self, progress: Progress):
        self.progress, self.total, self.done = progress, 0, 0

    def update(self, count: int) -> None:
        self.done += count
        self.progress(min(self.done, self.total) if self.total else self.done, self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        pass


def _reason(error: Exception, url: str) -> str:
    """Describe an error in a few words; those of requests have a page."""
    from requests import exceptions

    if isinstance(error, exceptions.HTTPError):
        return f"{error}"[:200]
    if isinstance(error, exceptions.Timeout):
        return f"no answer from {urlsplit(url).netloc} in time"
    if isinstance(error, exceptions.ChunkedEncodingError):
        return "a connection that broke off"
    if isinstance(error, exceptions.ConnectionError):
        return f"no connection to {urlsplit(url).netloc}"
    if isinstance(error, OSError) and not isinstance(error, exceptions.RequestException):
        return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    if type(error) is ValueError and "hash" in str(error):
        # "SHA256 hash of downloaded file (NAME) does not match the known hash: expected X but got Y. Deleted ..."
        checksum = str(error).partition(" but got ")[2].partition(".")[0]
        return f"a file with another checksum ({checksum}), so it is broken or a new edition"
    if isinstance(error, BlockSparseError):
        return str(error)
    return f"a broken answer ({type(error).__name__}: {error})"
