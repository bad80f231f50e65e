"""The forms of a benchmark's result: a Markdown table as llama-bench prints it, JSON, JSON lines, CSV."""

from __future__ import annotations

import csv
import io
from typing import Any, Protocol

from llmctl.commands import console

Row = dict[str, Any]
_SAMPLES = ("samples_ns", "samples_ts")


class Printer(Protocol):
    """Takes rows as they are measured."""

    def row(self, test: str, row: Row) -> None:
        """test: the name of the test, as pp512."""

    def end(self) -> None:
        """No more rows come."""


def make_printer(form: str) -> Printer:
    """form: md, json (an array), jsonl, csv, or "document" (one versioned object)."""
    return {"md": Markdown, "json": JsonArray, "jsonl": JsonLines, "csv": Csv, "document": JsonDocument}[form]()


class Markdown:
    """llama-bench's columns and widths; dtype and cache type join when they are not the default."""

    def __init__(self) -> None:
        self._columns: list[tuple[str, int]] = []

    def row(self, test: str, row: Row) -> None:
        if not self._columns:
            self._begin(row)
        rate = f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"
        values = {**row, "model": row["model_type"], "size": _size(row), "params": _params(row), "test": test, "t/s": rate}
        values |= {"backend": row["backends"], "threads": row["n_threads"]}
        console.result("|" + "".join(f" {_pad(str(values[name]), width)} |" for name, width in self._columns))

    def _begin(self, row: Row) -> None:
        """A negative width aligns to the left."""
        from llmctl.kernels.backend import default_dtype, default_kv_type

        self._columns = [("model", -30), ("size", 10), ("params", 10), ("backend", -10), ("threads", 7)]
        kv_type = default_kv_type(row["backends"])
        usual = {"dtype": default_dtype(row["backends"]), "type_k": kv_type, "type_v": kv_type}
        self._columns += [(name, -8) for name, value in usual.items() if row[name] != value]
        self._columns += [("kv_policy", -20)] if row["kv_policy"] != "full" else []
        self._columns += [("activations", -11)] if row["activations"] == "float" else []
        self._columns += [("devices", -12)] if row["devices"] != "cpu" else []
        self._columns += [("test", 15), ("t/s", 20)]
        console.result("|" + "".join(f" {_pad(name, width)} |" for name, width in self._columns))
        rules = ("-" * (abs(width) - 1) + (":" if width > 0 else "-") for _, width in self._columns)
        console.result("|" + "".join(f" {rule} |" for rule in rules))

    def end(self) -> None:
        pass


def _pad(text: str, width: int) -> str:
    return text.rjust(width) if width > 0 else text.ljust(-width)


def _size(row: Row) -> str:
    mebibytes = row["model_size"] / 1024**2
    return f"{mebibytes:.2f} MiB" if mebibytes < 1024 else f"{mebibytes / 1024:.2f} GiB"


def _params(row: Row) -> str:
    count = row["model_n_params"]
    return f"{count / 1e6:.2f} M" if count < 1e9 else f"{count / 1e9:.2f} B"


class JsonLines:
    """One object a line, as soon as it is measured."""

    def row(self, test: str, row: Row) -> None:
        console.print_json(row, indent=None)

    def end(self) -> None:
        pass


class JsonArray:
    """One array of all objects, at the end."""

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def row(self, test: str, row: Row) -> None:
        self._rows.append(row)

    def end(self) -> None:
        console.print_json_array(self._rows)


class JsonDocument(JsonArray):
    """One object, as every --json of llmctl is."""

    def end(self) -> None:
        console.print_json({"tests": self._rows})


class Csv:
    """A line of names, then a line a test; the single samples are only in JSON."""

    def __init__(self) -> None:
        self._begun = False

    def row(self, test: str, row: Row) -> None:
        fields = {name: value for name, value in row.items() if name not in _SAMPLES}
        if not self._begun:
            console.result(",".join(fields))
            self._begun = True
        line = io.StringIO()
        csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="").writerow(fields.values())
        console.result(line.getvalue())

    def end(self) -> None:
        pass
