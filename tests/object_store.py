"""An object store on this machine: what S3, and Google's XML interface, answer to reads."""

import functools
import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

LONG_AGO = "Thu, 01 Jan 2026 00:00:00 GMT"


class ObjectStore:
    """Buckets in memory.

    Attributes:
      address: where the store listens.
      objects: `bucket/name` -> contents.
      reads: names and sizes of what was read.
      failures: how many of the next reads fail as an overloaded store does.
      refused: `bucket/name` of what nobody may read.
    """

    def __init__(self, address: str):
        self.address = address
        self.objects: dict[str, bytes] = {}
        self.reads: list[tuple[str, int]] = []
        self.failures = 0
        self.refused: set[str] = set()

    def buckets(self) -> set[str]:
        """The buckets that have objects."""
        return {name.partition("/")[0] for name in self.objects}


def upload(store: ObjectStore, folder: Path) -> ObjectStore:
    """Puts a folder and all below it into `models/team/`."""
    for file in folder.rglob("*"):
        if file.is_file():
            name = file.relative_to(folder.parent).as_posix()
            store.objects[f"models/team/{name}"] = file.read_bytes()
    return store


@contextmanager
def serve() -> Iterator[ObjectStore]:
    """Serves an empty store on a free port."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.store = ObjectStore(f"http://127.0.0.1:{server.server_port}")
    # The end waits for a poll, which is each half second by default.
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    try:
        yield server.store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections that wait to be accepted


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        """Says nothing."""

    def do_GET(self):
        store, url = self.server.store, urlsplit(self.path)
        # Google's JSON interface, by which TensorStore reads, names an object in one piece.
        path = re.sub("^/storage/v1/b/([^/]+)/o/", r"/\1/", url.path)
        name = unquote(path).strip("/")
        if store.failures:
            store.failures -= 1
            return self._answer(503)
        if name.partition("/")[0] not in store.buckets():
            return self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        if "/" not in name:
            return self._answer(200, self._list(name, parse_qs(url.query)))
        if name not in store.objects:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        if name in store.refused:
            return self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        data = store.objects[name]
        if self.headers.get("If-Match") not in (None, tag_of(data)):
            return self._answer(412)
        first, last = 0, len(data) - 1
        if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
            first, last = int(asked[1]), min(int(asked[2]), last)
        found = data[first : last + 1]
        store.reads.append((name.rpartition("/")[2], len(found)))
        headers = {"ETag": tag_of(data), "Last-Modified": LONG_AGO, "x-goog-generation": "1"}
        if asked:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return self._answer(206 if asked else 200, found, headers)

    def _list(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        start = f"{bucket}/{query.get('prefix', [''])[0]}"
        inside = {
            name: data
            for name, data in sorted(self.server.store.objects.items())
            if name.startswith(start) and not ("delimiter" in query and "/" in name[len(start) :])
        }
        entries = "".join(
            f"<Contents><Key>{escape(name.partition('/')[2])}</Key><Size>{len(data)}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(tag_of(data))}</ETag></Contents>"
            for name, data in inside.items()
        )
        return f"<ListBucketResult><Name>{bucket}</Name>{entries}</ListBucketResult>".encode()

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@functools.cache
def tag_of(data: bytes) -> str:
    """The entity tag of an object's contents."""
    return f'"{hashlib.md5(data).hexdigest()}"'
