"""Downloads from a local server: caching, checksums and errors."""

import hashlib
import http.server
import io
import tarfile
import threading
import zipfile

import pytest

from blocksparse import BlockSparseError
from blocksparse_lab.data import corpora, download, reviews


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKSPARSE_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def server():
    """Serve `server.files` by path, and count requests in `server.asked`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.asked.append(self.path)
            data = server.files.get(self.path)
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"") + server.missing))
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.missing = {}, [], 0
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def zipped(**files: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def tarred(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def test_a_file_is_fetched_once(server, cache):
    server.files["/a.txt"] = data = bytes(range(256)) * 1000
    seen = []
    path = download.fetch(f"{server.url}/a.txt", sha256(data), "texts/a.txt", lambda *at: seen.append(at))
    assert path == cache / "texts" / "a.txt"
    assert path.read_bytes() == data
    assert seen[-1] == (len(data), len(data))
    assert all(done <= total == len(data) for done, total in seen)
    assert download.fetch(f"{server.url}/a.txt", sha256(data), "texts/a.txt") == path
    assert server.asked == ["/a.txt"]


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_archives_are_unpacked_and_dropped(server, cache, kind):
    data = zipped(a=b"one", b=b"two") if kind == "zip" else tarred({"a": b"one", "b": b"two"})
    server.files[f"/set.{kind}"] = data
    folder = download.fetch(f"{server.url}/set.{kind}", sha256(data), "set")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"one", "b": b"two"}
    assert list(cache.iterdir()) == [folder]
    download.fetch(f"{server.url}/set.{kind}", sha256(data), "set")
    assert len(server.asked) == 1


def test_another_checksum_is_not_kept(server, cache):
    server.files["/a.txt"] = b"not what it was"
    with pytest.raises(
        BlockSparseError, match=r"a\.txt: expected a download.*--data-dir, got .*another checksum"
    ) as said:
        download.fetch(f"{server.url}/a.txt", sha256(b"what it was"), "a.txt")
    assert hashlib.sha256(b"not what it was").hexdigest() in str(said.value)
    assert list(cache.iterdir()) == []


def test_a_server_that_is_gone(server, cache):
    server.shutdown()
    server.server_close()
    with pytest.raises(BlockSparseError, match=r"or a folder with the files as --data-dir, got no connect"):
        download.fetch(f"{server.url}/a.txt", sha256(b""), "a.txt")


def test_a_file_that_is_gone(server, cache):
    with pytest.raises(BlockSparseError, match="--data-dir, got 404"):
        download.fetch(f"{server.url}/a.txt", sha256(b""), "a.txt")


def test_a_connection_that_breaks_off(server, cache):
    server.files["/a.txt"], server.missing = b"half", 4
    with pytest.raises(BlockSparseError, match="--data-dir, got a connection that broke off"):
        download.fetch(f"{server.url}/a.txt", sha256(b"half and"), "a.txt")
    assert list(cache.iterdir()) == []


def test_a_broken_archive_leaves_no_folder(server, cache):
    server.files["/set.tar.gz"] = data = tarred({"a": bytes(range(256)) * 400})[:-100]
    with pytest.raises(BlockSparseError, match="got a broken archive"):
        download.fetch(f"{server.url}/set.tar.gz", sha256(data), "set")
    assert not (cache / "set").exists()
    assert [path.name for path in cache.iterdir()] == ["set.tar.gz"]


def test_a_cache_that_cannot_be_written(server, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BLOCKSPARSE_DATA", str(tmp_path / "file"))
    with pytest.raises(BlockSparseError, match=r"--data-dir, got (Not a directory|File exists)"):
        download.fetch(f"{server.url}/a.txt", sha256(b""), "a.txt")


def test_loaders_download_where_no_folder_is_given(server, cache, monkeypatch):
    data = server.files["/enwik8.zip"] = zipped(enwik8=b"<mediawiki")
    source = corpora.Source("enwik8", 10, f"{server.url}/enwik8.zip", sha256(data))
    monkeypatch.setitem(corpora.SOURCES, "enwik8", source)
    assert corpora.load("enwik8") == corpora.load("enwik8") == b"<mediawiki"

    csv = b"label,sentence\n0,bad\n1,good\n"
    for part in ("train", "dev", "test"):
        server.files[f"/{part}_binary_sent.csv"] = csv
    monkeypatch.setattr(reviews, "SST_URL", f"{server.url}/")
    monkeypatch.setattr(reviews, "SST_HASHES", dict.fromkeys(reviews.SST_HASHES, sha256(csv)))
    assert reviews.load("sst").validation.texts == ["bad", "good"]

    folders = [f"aclImdb/{part}/{kind}" for part in ("train", "test") for kind in ("neg", "pos")]
    files = {f"{folder}/{i}_7.txt": b"So so." for folder in folders for i in range(10)}
    data = server.files["/aclImdb_v1.tar.gz"] = tarred(files | {"aclImdb/train/unsup/0_0.txt": b"No idea."})
    monkeypatch.setattr(reviews, "IMDB_URL", f"{server.url}/aclImdb_v1.tar.gz")
    monkeypatch.setattr(reviews, "IMDB_HASH", f"md5:{hashlib.md5(data).hexdigest()}")
    splits = reviews.load("imdb")
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (18, 2, 20)
    assert corpora.load("imdb") == b"\n No idea. "
    assert len(server.asked) == 5
