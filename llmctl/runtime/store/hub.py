"""Models of the Hugging Face hub, through huggingface_hub: its cache, its token, its offline mode."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmctl.errors import DownloadError, LlmctlError, ModelNotFoundError, OutputError, UsageError
from llmctl.runtime.store.entries import Bar, Fetched, ProgressFactory

_SPEC = re.compile(r"([\w.-]+/[\w.-]+)(?::(.+))?")
_SPLIT = re.compile(r"(.+)-(\d{5})-of-\d{5}\.gguf", re.IGNORECASE)
_BESIDE_WEIGHTS = re.compile(r"[^/]+\.(json|jinja|model|txt)")
_PREFERRED_TYPE = "Q4_K_M"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: name, bytes (None when offline) and, for large ones, sha256."""

    name: str
    size: int | None
    sha256: str | None


@dataclass(frozen=True)
class HubSource:
    """hf:owner/name, with a file name or a quantization type, or neither."""

    repo: str
    selector: str | None

    @property
    def name(self) -> str:
        return self.repo + (f":{self.selector}" if self.selector else "")

    def fetch(self, folder: Path, scratch: Path, progress: ProgressFactory) -> Fetched:
        """Bring the chosen files into the hub's own cache. Errors: ModelNotFoundError, DownloadError, OutputError."""
        with naming_the_hub(self.repo):
            revision, license, files = list_files(self.repo)
            chosen = choose_files(self.repo, files, self.selector)
            sizes = [file.size for file in chosen if file.size is not None]
            total = sum(sizes) if len(sizes) == len(chosen) else None
            others = f" and {len(chosen) - 1} more" if len(chosen) > 1 else ""
            with progress(f"Pulling hf:{self.repo}: {chosen[0].name}{others}", total) as bar:
                paths = _download_all(self.repo, revision, chosen, bar)
        gguf = paths[0].suffix.lower() == ".gguf"
        path = paths[0] if gguf or self.selector else paths[0].parent
        size = sum(item.stat().st_size for item in paths) if path.is_dir() else path.stat().st_size
        return Fetched(path, f"hf:{self.name}@{revision}", chosen[0].sha256 if path.is_file() else None, size, license)


def parse_hub(text: str) -> HubSource:
    """The source behind hf:TEXT. Errors: UsageError."""
    match = _SPEC.fullmatch(text)
    if match is None:
        raise UsageError(f"hf:{text}: expected hf:OWNER/NAME, or hf:OWNER/NAME:FILE or :TYPE (such as Q4_K_M)")
    return HubSource(match[1], match[2])


def list_files(repo: str) -> tuple[str, str | None, list[HubFile]]:
    """Revision, license and files of a repository; offline, what the cache holds of it."""
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return _list_cached_files(repo)
    found = huggingface_hub.HfApi().model_info(repo, files_metadata=True)
    files = [HubFile(s.rfilename, s.size, s.lfs["sha256"] if s.lfs else None) for s in found.siblings or []]
    return found.sha, found.card_data.get("license") if found.card_data else None, files


def _list_cached_files(repo: str) -> tuple[str, str | None, list[HubFile]]:
    """As list_files, of the newest revision in huggingface_hub's cache."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cached = [found for found in scan_cache_dir().repos if found.repo_id == repo and found.repo_type == "model"]
    except CacheNotFound:
        cached = []
    revisions = [revision for found in cached for revision in found.revisions]
    if not revisions:
        raise DownloadError(f"hf:{repo} is not in the Hugging Face cache, and HF_HUB_OFFLINE forbids to fetch it")
    newest = max(revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified))
    names = sorted(file.file_path.relative_to(newest.snapshot_path).as_posix() for file in newest.files)
    return newest.commit_hash, None, [HubFile(name, None, None) for name in names]


def choose_files(repo: str, files: list[HubFile], selector: str | None) -> list[HubFile]:
    """The files to bring, the one to open first: a GGUF with its shards, or a folder's weights and what lies beside.

    Without a selector safetensors come first, then the only GGUF, then the Q4_K_M one. Errors: ModelNotFoundError.
    """
    ggufs = _group_shards([file for file in files if file.name.lower().endswith(".gguf") and "mmproj" not in file.name])
    if selector is None:
        weights = _top_level_weights(files)
        if weights:
            return weights + _beside(files)
        if len(ggufs) == 1:
            return next(iter(ggufs.values()))
        selector = _PREFERRED_TYPE
    named = [file for file in files if file.name == selector]
    if named and named[0].name.endswith(".safetensors"):
        return named + _beside(files)
    if named:
        return next((group for group in ggufs.values() if named[0] in group), named)
    matches = {stem: group for stem, group in ggufs.items() if _has_type(stem, selector)}
    if len(matches) == 1:
        return next(iter(matches.values()))
    raise _no_choice(repo, selector, list(matches or ggufs), bool(matches))


def _group_shards(files: list[HubFile]) -> dict[str, list[HubFile]]:
    """GGUF files by their name without shard number and ending; the shards of each in order."""
    groups: dict[str, list[HubFile]] = {}
    for file in sorted(files, key=lambda file: file.name):
        split = _SPLIT.fullmatch(file.name)
        groups.setdefault(split[1] if split else file.name[: -len(".gguf")], []).append(file)
    return groups


def _top_level_weights(files: list[HubFile]) -> list[HubFile]:
    """safetensors of the repository's root; those named model* win over a second copy in another layout."""
    weights = [file for file in files if file.name.endswith(".safetensors") and "/" not in file.name]
    return [file for file in weights if file.name.startswith("model")] or weights


def _beside(files: list[HubFile]) -> list[HubFile]:
    """Config, tokenizer and templates of the repository's root."""
    return [file for file in files if _BESIDE_WEIGHTS.fullmatch(file.name)]


def _has_type(stem: str, type_name: str) -> bool:
    """Whether a GGUF's name states this quantization type (Q4_K means Q4_K_M, as everywhere)."""
    wanted = re.escape(type_name) + ("(?:_M)?" if re.fullmatch(r"(?i)q[3-6]_k", type_name) else "")
    return re.search(rf"(?:^|[-._/]){wanted}(?:$|[-._/])", stem, re.IGNORECASE) is not None


def _no_choice(repo: str, selector: str, candidates: list[str], several: bool) -> ModelNotFoundError:
    listed = ", ".join(candidates[:12]) + (", …" if len(candidates) > 12 else "")
    if several:
        return ModelNotFoundError(f"hf:{repo}: several files are {selector}, name one: {listed}")
    return ModelNotFoundError(f"hf:{repo} has no file or type {selector}; it has {listed or 'no model files'}")


def _download_all(repo: str, revision: str, files: list[HubFile], bar: Bar) -> list[Path]:
    """Paths of the files in the cache, each compared with the hub's sha256 where it states one."""
    from huggingface_hub import hf_hub_download

    paths, before = [], 0
    for file in files:
        relay = _relay(bar, before)
        path = Path(hf_hub_download(repo, file.name, revision=revision, tqdm_class=relay))
        if file.sha256 and _sha256(path) != file.sha256:
            path.resolve().unlink()
            raise DownloadError(f"hf:{repo}: {file.name} arrived with other bytes than the hub states; it was removed")
        before += file.size or 0
        bar.update_to(before)
        paths.append(path)
    return paths


def _relay(bar: Bar, before: int) -> type:
    """A stand-in for tqdm that passes the bytes of one file on to our bar, which already counts `before`."""

    class Relay:
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            self.done = before + initial

        def __enter__(self) -> Relay:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: float | None = 1) -> None:
            self.done += int(count or 0)
            bar.update_to(self.done)

    return Relay


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def naming_the_hub(repo: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into our errors. Its HTTP library, and so the class of a lost connection,
    differs between versions: what has no class of its own is a failed connection, told with its own words."""
    from huggingface_hub import errors

    try:
        yield
    except LlmctlError:
        raise
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"hf:{repo} is gated: accept its terms on its page, then log in with 'hf auth login' or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"hf:{repo}: no such repository, or a private one that needs HF_TOKEN") from error
    except errors.OfflineModeIsEnabled as error:
        raise DownloadError(f"hf:{repo}: HF_HUB_OFFLINE forbids to fetch it, and the cache does not hold it") from error
    except errors.EntryNotFoundError as error:
        raise _missing_entry(repo, error) from error
    except Exception as error:
        if _is_disk_full(error):
            raise OutputError(f"hf:{repo}: no space left on the disk of the Hugging Face cache (HF_HOME)") from error
        raise DownloadError(f"hf:{repo} cannot be fetched: {type(error).__name__}: {_first_line(error)}") from error


def _missing_entry(repo: str, error: Exception) -> LlmctlError:
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return DownloadError(f"hf:{repo}: the cache lacks a file of it, and HF_HUB_OFFLINE forbids to fetch it")
    return DownloadError(f"hf:{repo} cannot be fetched: {_first_line(error)}")


def _is_disk_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no reason given")
