"""A chat on a pseudo-terminal, as a person sees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from pathlib import Path

ESCAPES = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_=>])")
PASTE_ON = b"\x1b[?2004h"  # switched on whenever a line is about to be read
PROMPT = "<prompt>"
CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """A chat on a pseudo-terminal. `shown`: all it wrote, without escape sequences, and PROMPT where it reads a line."""

    def __init__(self, script: Path, *arguments: object, home: Path, env: dict[str, str]) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.environ |= {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "LLMCTL_HOME": str(home), **env}
            os.execv(script, [str(script), "run", *map(str, arguments)])
        self.resize(50, 200)
        self.settings = termios.tcgetattr(self._terminal)
        self.shown, self._seen, self._raw, self._code = "", 0, b"", None

    def expect(self, text: str, timeout: float = 30) -> None:
        """Wait until `text` is shown, after what was expected before."""
        end = time.monotonic() + timeout
        while (place := self.shown.find(text, self._seen)) < 0:
            assert time.monotonic() < end, f"{text!r} was not shown; there is {self.shown[self._seen :]!r}"
            assert self._read(0.5), f"{text!r} was not shown before the end; there is {self.shown[self._seen :]!r}"
        self._seen = place + len(text)

    def _read(self, timeout: float) -> bool:
        """Take in what there is; False at the end."""
        if self._terminal < 0 or not select.select([self._terminal], [], [], timeout)[0]:
            return True
        try:
            data = os.read(self._terminal, 65536)
        except OSError:  # EIO: nobody is on the other side
            return False
        self._raw += data
        marked = self._raw.replace(PASTE_ON, PROMPT.encode())
        self.shown = ESCAPES.sub(b"", marked).decode("utf-8", "replace").replace("\r", "")
        return bool(data)

    def type(self, keys: str | bytes) -> None:
        os.write(self._terminal, keys if isinstance(keys, bytes) else keys.encode())

    def say(self, line: str) -> None:
        """A line and Enter, once the prompt is there."""
        self.expect(PROMPT)
        self.type(line + "\r")

    def wait(self, timeout: float = 30) -> int:
        """The exit code."""
        end = time.monotonic() + timeout
        while self._code is None:
            with contextlib.suppress(OSError):
                self._read(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
            assert time.monotonic() < end, f"it does not end; there is {self.shown[self._seen :]!r}"
        return self._code

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    @property
    def raw(self) -> bytes:
        """All it wrote, as it came."""
        return self._raw

    def hang_up(self) -> None:
        os.close(self._terminal)
        self._terminal = -1

    def close(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        if self._terminal >= 0:
            self.hang_up()
