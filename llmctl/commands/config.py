"""llmctl.toml, presets and environment variables: what an option is when the command line does not say.

The command line beats a preset, that beats the environment (LLMCTL_RUN_TOP_K), that the project's llmctl.toml (the nearest, from
the working folder upwards), that the platform's; only then come the model's file and the defaults. docs/configuration.md.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmctl.commands import console
from llmctl.errors import UsageError

FILE_NAME = "llmctl.toml"


@dataclass
class Setting:
    """An option's value, and where it is from, for messages."""

    value: Any
    where: str
    folder: Path | None = None


@dataclass
class Settings:
    """What applies to one command. values: by the names of its parameters. presets: name → the same, as they are written."""

    command: Any
    values: dict[str, Setting] = field(default_factory=dict)
    presets: dict[str, dict[str, Setting]] = field(default_factory=dict)

    def default_map(self) -> dict[str, Any]:
        """As typer takes it."""
        # The model is what stands in for one that is not named: `llmctl run "a question"` names none, but has an argument.
        return {name: setting.value for name, setting in self.values.items() if name != "model"}

    def use_preset(self, name: str) -> None:
        """Put a preset over the rest. Errors: UsageError if there is none of the name."""
        if name not in self.presets:
            known = f"there are: {', '.join(sorted(self.presets))}" if self.presets else f"no {FILE_NAME} has any"
            raise UsageError(f"--preset {name}: there is no such preset; {known}")
        self.values |= self.presets[name]


def load(command: Any, name: str) -> Settings:
    """The settings of a command from files and environment. Errors: UsageError naming file and key, OSError."""
    settings = Settings(command)
    for file in config_files():
        tables = _read(file)
        settings.values |= _table(command, tables.get(name, {}), f"{file}: [{name}]", file.parent)
        if name == "run":
            for preset, table in _tables(tables.get("preset", {}), f"{file}: [preset]").items():
                settings.presets[preset] = _table(command, table, f"{file}: [preset.{preset}]", file.parent)
    settings.values |= _environment(command, name)
    return settings


def config_files() -> list[Path]:
    """The files there are: the platform's, then the project's."""
    from llmctl.runtime import paths

    here = Path.cwd()
    candidates = (folder / FILE_NAME for folder in (here, *here.parents))
    project = next((file for file in candidates if file.is_file()), None)
    if project is not None and not _is_ours(project):
        console.warn(f"{project} belongs to another user and is not read")
        project = None
    platform = paths.config_dir() / FILE_NAME
    found = [platform] if platform.is_file() else []
    return found if project is None or (found and project.samefile(platform)) else [*found, project]


def _is_ours(file: Path) -> bool:
    """Whether nobody else wrote a file that is found without being named: in /tmp, say."""
    return not hasattr(os, "geteuid") or file.stat().st_uid in (os.geteuid(), 0)


def preset_names() -> list[str]:
    """Of all files, for completion."""
    return sorted({name for file in config_files() for name in _tables(_read(file).get("preset", {}), str(file))})


def _read(file: Path) -> dict[str, Any]:
    from llmctl.commands.group import COMMANDS

    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    try:
        tables = tomllib.loads(file.read_bytes().decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not TOML: {error}") from None
    known = [*(name for name, command in COMMANDS.items() if command.attribute != "app"), "preset"]
    unknown = next((name for name in tables if name not in known), None)
    if unknown is not None:
        raise UsageError(f"{file}: there is no command {unknown!r} to set; {_near(unknown, known)}")
    return _tables(tables, str(file))


def _tables(found: Any, where: str) -> dict[str, dict[str, Any]]:
    wrong = found if not isinstance(found, dict) else next((v for v in found.values() if not isinstance(v, dict)), None)
    if wrong is not None:
        raise UsageError(f"{where}: expected tables of options, found {wrong!r}")
    return found


def _table(command: Any, table: Mapping[str, Any], where: str, folder: Path) -> dict[str, Setting]:
    return dict(_setting(command, key, value, f"{where} {key}", folder) for key, value in table.items())


def _environment(command: Any, name: str) -> dict[str, Setting]:
    prefix = f"LLMCTL_{name.upper().replace('-', '_')}_"
    found = {}
    for variable, text in os.environ.items():
        if variable.startswith(prefix) and text:
            key = variable.removeprefix(prefix).lower()
            found.update([_setting(command, key, text, variable, None)])
    return found


def _setting(command: Any, key: str, value: Any, where: str, folder: Path | None) -> tuple[str, Setting]:
    """A parameter's name and its checked value. Errors: UsageError."""
    options = {_key(option): parameter for parameter in command.params for option in parameter.opts if not _is_short(option)}
    options = {key: parameter for key, parameter in options.items() if parameter.name not in ("words", "prompt", "help")}
    parameter = options.get(_key(key))
    if parameter is None:
        raise UsageError(f"{where}: there is no option --{key.replace('_', '-')}; {_near(key, list(options))}")
    if getattr(parameter, "multiple", False) and isinstance(value, str):
        value = [value]
    return parameter.name, Setting(_checked(command, parameter, _placed(parameter, value, folder), where), where, folder)


def _placed(parameter: Any, value: Any, folder: Path | None) -> Any:
    """Paths in a file are relative to its folder."""
    is_path = type(parameter.type).__name__ == "TyperPath" or (parameter.name == "model" and str(value).startswith("."))
    if folder is None or not is_path or not isinstance(value, str) or value == "-":
        return value
    return str(folder / Path(value).expanduser())


def _checked(command: Any, parameter: Any, value: Any, where: str) -> Any:
    """The value, if the option takes it. Errors: UsageError with typer's reason."""
    import typer

    usage_error = typer.BadParameter.__mro__[1]
    with command.context_class(command) as context:
        try:
            parameter.type_cast_value(context, value)
        except (usage_error, TypeError, ValueError) as error:
            reason = getattr(error, "message", str(error))
            raise UsageError(f"{where}: {reason[:1].lower()}{reason[1:].rstrip('.')}") from None
    return value


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(_key(name), known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"


def _key(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _is_short(option: str) -> bool:
    return option.startswith("-") and not option.startswith("--")


def configured(base: type) -> type:
    """A command class that takes its defaults from the settings, and tells with --verbose what it took from where."""

    class Configured(base):  # type: ignore[misc, valid-type]
        settings: Settings

        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            if not extra.get("resilient_parsing"):  # else it is completion, which no file may disturb
                self.settings = load(self, self.name)
                extra["default_map"] = self.settings.default_map()
            return super().make_context(info_name, args, parent, **extra)

        def invoke(self, ctx: Any) -> Any:
            _set_default_model(self.settings)
            for line in describe(ctx, self.settings):
                console.detail(line)
            return super().invoke(ctx)

    return Configured


def apply_preset(ctx: Any, name: str | None) -> str | None:
    """The callback of --preset, which comes before those of the other options. Errors: UsageError."""
    if name is not None and not ctx.resilient_parsing:
        ctx.command.settings.use_preset(name)
        ctx.default_map = ctx.command.settings.default_map()
    return name


def describe(ctx: Any, settings: Settings) -> list[str]:
    """What was not on the command line and is no default, and where it is from."""
    used = [name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "DEFAULT_MAP"]
    if "model" in settings.values and not os.environ.get("LLMCTL_MODEL"):
        used.append("model")
    return [f"setting: {name} {settings.values[name].value} (from {settings.values[name].where})" for name in used]


def _set_default_model(settings: Settings) -> None:
    from llmctl.runtime.store import set_default_model

    model = settings.values.get("model")
    set_default_model(None if model is None else str(model.value), "" if model is None else model.where)
