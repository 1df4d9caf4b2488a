"""A private ComfyUI server with this pack in it, started and driven from Python."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import requests
import torch
import websocket

from .host import ROOT, comfyui_path

START_SECONDS = 180
# Threads of torch that wait by spinning starve each other, and all else, on a machine that is busy.
PATIENT_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
TEXT_EVENT = 3  # comfy's BinaryEventTypes.TEXT
END_EVENTS = ("execution_success", "execution_error", "execution_interrupted")

Event = dict  # {"type": str, "data": dict}, as ComfyUI's websocket sends them


class PromptFailed(RuntimeError):
    """A prompt was refused, failed or was interrupted; `entry` is its history entry, if it has one."""

    def __init__(self, message: str, entry: dict | None = None, interrupted: bool = False):
        super().__init__(message)
        self.entry = entry
        self.interrupted = interrupted


class ComfyServer:
    """A running server. Its folders (models, input, output, user) are its own and vanish with it."""

    def __init__(self, port: int, folder: Path, log_path: Path, process: subprocess.Popen):
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.folder = folder
        self.log_path = log_path
        self.process = process
        self.client_id = uuid.uuid4().hex
        self.socket: websocket.WebSocket | None = None

    def get(self, path: str, **query: str) -> requests.Response:
        """GET `path` of the server, with any status."""
        return requests.get(self.url + path, params=query, timeout=60)

    def json(self, path: str) -> dict:
        """The JSON under `path`; requests.HTTPError for a status of 400 or more."""
        response = self.get(path)
        response.raise_for_status()
        return response.json()

    def object_info(self) -> dict:
        """The description of every node that the server knows, by node id."""
        return self.json("/object_info")

    def log(self) -> str:
        """What the server has printed so far."""
        return self.log_path.read_text(errors="replace")

    def queue(self, prompt: dict) -> str:
        """Queue a prompt in API format and return its id; PromptFailed when the server refuses it."""
        body = {"prompt": prompt, "client_id": self.client_id}
        response = requests.post(self.url + "/prompt", json=body, timeout=60)
        if response.status_code != 200:
            raise PromptFailed(f"ComfyUI refused the prompt: {response.text}")
        return response.json()["prompt_id"]

    def interrupt(self) -> None:
        """Stop the prompt that runs now."""
        requests.post(self.url + "/interrupt", timeout=60).raise_for_status()

    def wait(
        self,
        prompt_id: str,
        on_progress: Callable[[Event], None] | None = None,
        timeout: float = 600,
    ) -> dict:
        """Wait until the prompt has run and return its history entry.

        `on_progress` gets every websocket event meanwhile, and text that a node shows as
        {"type": "progress_text", "data": {"node", "text"}}. PromptFailed after an error or an interrupt.
        """
        deadline = time.monotonic() + timeout
        ended = False
        while time.monotonic() < deadline:
            # The entry follows the last event after a moment; without events, look for it now and then.
            event = self._next_event(seconds=0.05 if ended else 1.0)
            if event is not None:
                if on_progress is not None:
                    on_progress(event)
                ended = ended or (event["type"] in END_EVENTS and event["data"]["prompt_id"] == prompt_id)
                if not ended:
                    continue
            entry = self.json(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None:
                return _checked(entry)
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI stopped while it ran a prompt:\n{_tail(self.log_path)}")
        raise TimeoutError(f"prompt {prompt_id} has not finished in {timeout:.0f} s; log: {self.log_path}")

    def run(self, prompt: dict, on_progress: Callable[[Event], None] | None = None) -> dict:
        """Queue a prompt, wait for it and return its history entry."""
        return self.wait(self.queue(prompt), on_progress)

    def file(self, reference: Mapping[str, str]) -> bytes:
        """The bytes of a saved file, by its {"filename", "subfolder", "type"} in a history entry."""
        names = {key: reference[key] for key in ("filename", "subfolder", "type")}
        response = self.get("/view", **names)
        response.raise_for_status()
        return response.content

    def _next_event(self, seconds: float) -> Event | None:
        if self.socket is None:
            self.connect()
        self.socket.settimeout(seconds)
        try:
            message = self.socket.recv()
        except websocket.WebSocketTimeoutException:
            return None
        if isinstance(message, str):
            return json.loads(message)
        if struct.unpack_from(">I", message)[0] != TEXT_EVENT:
            return None
        length = struct.unpack_from(">I", message, 4)[0]
        node, text = message[8 : 8 + length], message[8 + length :]
        return {"type": "progress_text", "data": {"node": node.decode(), "text": text.decode()}}

    def connect(self) -> None:
        """Open the websocket; events of prompts queued before are lost."""
        address = f"ws://127.0.0.1:{self.port}/ws?clientId={self.client_id}"
        self.socket = websocket.create_connection(address, timeout=30)

    def stop(self) -> None:
        """End the server process."""
        if self.socket is not None:
            self.socket.close()
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _checked(entry: dict) -> dict:
    status = entry["status"]
    if status["status_str"] == "success":
        return entry
    for kind, data in status["messages"]:
        if kind == "execution_interrupted":
            raise PromptFailed("the prompt was interrupted", entry, interrupted=True)
        if kind == "execution_error":
            where = f"{data['node_type']} (node {data['node_id']})"
            raise PromptFailed(f"{where}: {data['exception_type']}: {data['exception_message']}", entry)
    raise PromptFailed(f"the prompt failed: {status}", entry)


def _tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_up(server: ComfyServer) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"ComfyUI stopped while starting:\n{_tail(server.log_path)}")
        try:
            if server.get("/system_stats").ok:
                return
        except requests.ConnectionError:
            time.sleep(0.25)
    raise TimeoutError(f"ComfyUI is not up after {START_SECONDS} s:\n{_tail(server.log_path)}")


@contextmanager
def comfy_server(
    extra_args: Sequence[str] = (),
    log_path: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[ComfyServer]:
    """Start ComfyUI on a free port, with this checkout as its only custom node pack, and stop it at the end.

    The base directory is a temporary one, so that no run touches a user's ComfyUI. `extra_args` go on its
    command line, `env` into its environment; what it prints goes to `log_path` (default: with the folders).
    """
    with tempfile.TemporaryDirectory(prefix="quantwm-server-") as name:
        folder = Path(name)
        for part in ("custom_nodes", "input", "output", "temp", "user", "models"):
            (folder / part).mkdir()
        (folder / "custom_nodes" / "quantwm").symlink_to(ROOT, target_is_directory=True)
        log_path = Path(log_path or folder / "server.log")
        log_path.parent.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        arguments = ["--base-directory", name, "--database-url", "sqlite:///:memory:"]
        arguments += ["--listen", "127.0.0.1", "--port", str(port)]
        arguments += ["--disable-auto-launch", "--disable-api-nodes"]
        if not torch.cuda.is_available():
            arguments.append("--cpu")
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(comfyui_path() / "main.py"), *arguments, *extra_args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**PATIENT_THREADS, **os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            )
        server = ComfyServer(port, folder, log_path, process)
        try:
            _wait_until_up(server)
            server.connect()
            yield server
        finally:
            server.stop()
