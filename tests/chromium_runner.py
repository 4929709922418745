"""Run WGSL kernels on NumPy arrays in headless Chromium, whose WebGPU needs no GPU: SwiftShader.

What Chromium's compiler (Tint) says of a kernel, a warning too, is an error here.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import numpy as np
from opencl_runner import Array
from webgpu_runner import Binding, Dispatch

PAGE = Path(__file__).with_name("webgpu_page.html")
PROGRAMS = ("chromium-headless-shell", "chromium")
OPTIONS = (
    "--headless",
    "--no-sandbox",  # it refuses to start as root with one; it sees nothing but our page
    "--enable-unsafe-webgpu",  # no adapter without it, since SwiftShader's is not trusted
    "--use-webgpu-adapter=swiftshader",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
)
TIMEOUT = 120  # seconds; it starts in one


@cache
def why_missing() -> str | None:
    """Why WGSL cannot be run here, in words; None if it can."""
    if not _program():
        return "Chromium is not installed: apt-get install chromium-headless-shell"
    try:
        run([])
    except RuntimeError as error:
        return f"WebGPU does not run here: {error}"
    return None


def _program() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def run(dispatches: Sequence[Dispatch]) -> list[dict[str, Array]]:
    """The buffers of each after it, but for sizes; RuntimeError with the page's words."""
    answers: Queue[Any] = Queue()
    jobs = json.dumps([_described(each) for each in dispatches]).encode()
    with _served(jobs, answers) as port, _browser(f"http://localhost:{port}/"):
        try:
            answer = answers.get(timeout=TIMEOUT)
        except Empty:
            raise RuntimeError(f"headless Chromium was silent for {TIMEOUT} s") from None
    if "error" in answer:
        raise RuntimeError(f"headless Chromium: {answer['error']}")
    return [
        {b.name: _array(result[b.name], b) for b in each.bindings if b.name in result}
        for each, result in zip(dispatches, answer["results"], strict=True)
    ]


def _described(each: Dispatch) -> dict[str, Any]:
    bindings = [{**vars(b), "data": base64.b64encode(b.data).decode()} for b in each.bindings]
    return {**vars(each), "bindings": bindings}


def _array(text: str, binding: Binding) -> Array:
    return np.frombuffer(base64.b64decode(text), binding.data.dtype)


@contextmanager
def _served(jobs: bytes, answers: Queue[Any]) -> Iterator[int]:
    """Serve the page and its jobs, and queue what it posts; gives the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {"/": ("text/html", PAGE.read_bytes()), "/jobs": ("application/json", jobs)}
            self._send(*pages.get(self.path, ("text/plain", b"")))

        def do_POST(self) -> None:
            answer = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send("text/plain", b"")
            answers.put(answer)  # ends the browser

        def _send(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("localhost", 0), Handler) as server:
        Thread(target=server.serve_forever).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@contextmanager
def _browser(address: str) -> Iterator[None]:
    """A browser at an address; when this returns all its processes have ended."""
    with tempfile.TemporaryDirectory(prefix="tvm_qopt-chromium-") as profile:
        command = [_program() or "", *OPTIONS, f"--user-data-dir={profile}", address]
        browser = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            yield
        finally:
            os.killpg(browser.pid, signal.SIGKILL)  # the program may be a script that starts it
            browser.communicate()  # to the end of the pipe, which each of them holds
