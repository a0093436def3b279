"""A plain server to compare ours with. It translates one request at a time, as LibreTranslate's server does.

    python -m benchmarks.one_at_a_time float32 2        # precision and number of threads

It prints `serving at URL` when it is ready. It supports only POST /translate with one text as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from transduce import Translator


def main(precision: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    translator = Translator.load(device="cpu", precision=precision)  # type: ignore[arg-type]
    translator.translate(["Das ist gut."])  # warm-up
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # with a buffer, a response is sent in one piece

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                (translation,) = translator.translate([request["q"]])
            body = json.dumps({"translatedText": translation.text}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Disable the log."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # for many clients that connect at once

    with Server(("127.0.0.1", 0), Handler) as server:
        print(f"serving at http://127.0.0.1:{server.server_address[1]}", file=sys.stderr, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
