# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium, controlled by the DevTools protocol over two pipes."""

import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
_SECONDS = 60  # longest wait for a reply, on a busy machine

OUTSIDE = """[...document.body.querySelectorAll("*")].filter(e => e.checkVisibility()
  && !e.closest(".scroll table, pre, .skip") && e.getBoundingClientRect().right > innerWidth + 1
  ).map(e => e.tagName + " " + e.textContent.slice(0, 40))"""


def executable():
    """Path of an installed Chromium; None without one."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with an empty profile and one tab.

    Attributes:
        events: what the tab reported so far, as DevTools events.
    """

    def __init__(self, path):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        for_browser, self._commands = os.pipe()
        self._replies, from_browser = os.pipe()
        self._process = _start(path, self._profile.name, for_browser, from_browser)
        os.close(for_browser)
        os.close(from_browser)
        self._number, self._buffer, self.events, self._session = 0, b"", [], None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.send(f"{domain}.enable")

    def send(self, method, **parameters):
        """The answer to a command.

        Raises:
            RuntimeError: the browser refused it, or does not reply.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda got: got.get("id") == self._number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, file):
        """Load a file."""
        self.visit(Path(file).resolve().as_uri())

    def visit(self, url):
        """Load an address."""
        self.events.clear()
        self.send("Page.navigate", url=url)
        if not any(one["method"] == "Page.loadEventFired" for one in self.events):
            self._until(lambda got: got.get("method") == "Page.loadEventFired")

    def requests(self):
        """Addresses that the page asked for, but for data in itself."""
        asked = [one for one in self.events if one["method"] == "Network.requestWillBeSent"]
        urls = [one["params"]["request"]["url"] for one in asked]
        return [url for url in urls if not url.startswith("data:")]

    def complaints(self):
        """Events of errors and of texts on the console."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [one for one in self.events if one["method"] in kinds]

    def evaluate(self, script):
        """The value of a JavaScript expression on the page."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"]))
        return found["result"].get("value")

    def show(self, *, width=1280, height=900):
        """Set the size of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def close(self):
        """End the browser."""
        try:
            self._session = None
            self.send("Browser.close")
        except (RuntimeError, OSError):
            os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._commands)
        os.close(self._replies)
        self._profile.cleanup()

    def _until(self, wanted):
        deadline = time.monotonic() + _SECONDS
        while True:
            message = self._next(deadline)
            if "method" in message:
                self.events.append(message)
            if wanted(message):
                return message

    def _next(self, deadline):
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._replies], [], [], left)[0]:
                raise RuntimeError(f"the browser did not reply for {_SECONDS} s")
            part = os.read(self._replies, 1 << 20)
            if not part:
                raise RuntimeError("the browser ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


def _start(path, profile, commands, replies):
    """Start the browser, which reads commands from descriptor 3 and replies on 4; returns its
    id."""
    # numbers that nobody has, above those that the browser gets
    spare = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 50) for one in (commands, replies)]
    quiet = os.open(os.devnull, os.O_RDWR)
    actions = [(os.POSIX_SPAWN_DUP2, quiet, number) for number in (0, 1, 2)]
    actions += [(os.POSIX_SPAWN_DUP2, one, 3 + place) for place, one in enumerate(spare)]
    actions += [(os.POSIX_SPAWN_CLOSE, one) for one in spare]
    arguments = [path, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    process = os.posix_spawn(path, arguments, os.environ, file_actions=actions)
    for one in (quiet, *spare):
        os.close(one)
    return process
