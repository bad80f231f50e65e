"""What llmctl verify shows: the checks with their findings, or two models tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.commands import console

if TYPE_CHECKING:
    from llmctl.quant.compare import Comparison, Difference
    from llmctl.quant.findings import Finding
    from llmctl.quant.verify import Check, Report

_SHOWN_FINDINGS = 40


def show(report: Report, json: bool, **facts: Any) -> None:
    """Print the report; FormatError if it has errors."""
    from llmctl.errors import FormatError

    if json:
        _print_json(report, **facts)
    else:
        _print(report)
    if not report.ok:
        raise FormatError(f"{report.path}: not sound: {_counts(report.findings)}")


def show_written(report: Report, target: Path, json: bool, **facts: Any) -> None:
    """The manifest's path is the result; what the checks warn of goes aside."""
    if json:
        _print_json(report, **facts, written=str(target))
        return
    for finding in report.findings:
        console.warn(_sentence(finding))
    console.result(str(target))


def _print_json(report: Report, **facts: Any) -> None:
    console.print_json(
        {
            "path": str(report.path),
            "ok": report.ok,
            "kind": report.kind,
            "files": [str(file) for file in report.files],
            "tensors": report.num_tensors,
            "tensor_bytes": report.tensor_bytes,
            "manifest": None if report.manifest is None else str(report.manifest),
            "checks": [{"name": check.name, "status": check.status, "skipped": check.skipped} for check in report.checks],
            "findings": [
                {"level": found.level, "check": found.check, "tensor": found.tensor, "message": found.message}
                for found in report.findings
            ],
            **facts,
        }
    )


def _print(report: Report) -> None:
    console.table(("CHECK", "RESULT"), [(check.name, _result(check, report)) for check in report.checks])
    if not report.findings:
        return
    console.result()
    for finding in report.findings[:_SHOWN_FINDINGS]:
        console.result(f"{finding.level}: {console.one_line(_sentence(finding))}")
    if report.findings[_SHOWN_FINDINGS:]:
        console.result(f"and {len(report.findings) - _SHOWN_FINDINGS} more; --json lists all")


def _result(check: Check, report: Report) -> str:
    if check.skipped is not None:
        return f"not checked: {console.one_line(check.skipped)}"
    if check.findings:
        return _counts(check.findings)
    if check.name == "structure":
        files = f"{len(report.files)} file{'s' if len(report.files) != 1 else ''}"
        return f"ok: {report.kind}, {files}, {report.num_tensors} tensors, {console.format_bytes(report.tensor_bytes)}"
    return f"ok: as {report.manifest} says" if check.name == "manifest" else "ok"


def _counts(findings: list[Finding]) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in ("error", "warning")}
    return ", ".join(f"{count} {level}{'s' if count != 1 else ''}" for level, count in counts.items() if count)


def _sentence(finding: Finding) -> str:
    from llmctl.runtime.checkpoint.text import quoted

    return finding.message if finding.tensor is None else f"tensor {quoted(finding.tensor)}: {finding.message}"


def show_comparison(result: Comparison, json: bool) -> None:
    """A line for each tensor and one for all, or one document."""
    if json:
        _print_comparison_json(result)
    else:
        _print_comparison(result)


def _print_comparison_json(result: Comparison) -> None:
    total = result.total
    console.print_json(
        {
            "path": str(result.path),
            "against": str(result.reference),
            "same_tensors": result.same_tensors,
            "identical": result.same_tensors and total.identical,
            "totals": {"tensors": len(result.differences), **_numbers(total)},
            "only_here": result.only_here,
            "only_there": result.only_there,
            "misshapen": {name: [list(shape) for shape in shapes] for name, shapes in result.misshapen.items()},
            "tensors": [
                {
                    "name": found.name,
                    "type": found.type,
                    "against_type": found.reference_type,
                    "shape": list(found.shape),
                    **_numbers(found),
                }
                for found in result.differences
            ],
        }
    )


def _numbers(found: Difference) -> dict[str, Any]:
    return {
        "identical": found.identical,
        "max_error": found.max_error,
        "relative_rms": found.relative_rms,
        "sqnr_db": found.sqnr_db,
        "nonfinite": found.nonfinite,
    }


def _print_comparison(result: Comparison) -> None:
    rows = [_row(found) for found in result.differences]
    total = result.total
    rows.append((f"all {len(rows)}", "", "", *_row(total)[3:]))
    headers = ("TENSOR", "TYPE", "AGAINST", "MAX ERROR", "RELATIVE RMS", "SQNR dB")
    console.table(headers, rows, right=(3, 4, 5))
    for title, names in (("only in", result.only_here), ("not in", result.only_there)):
        for name in names:
            console.result(f"{title} {result.path}: {console.one_line(name)}")
    for name, (here, there) in result.misshapen.items():
        console.result(f"other shapes: {console.one_line(name)} {list(here)} against {list(there)}")


def _row(found: Difference) -> tuple[str, ...]:
    name = console.one_line(found.name)
    if found.identical:
        return name, found.type, found.reference_type, "identical", "", ""
    error = f"{found.max_error:.3e}" + (f" ({found.nonfinite} not finite)" if found.nonfinite else "")
    rms = "" if found.relative_rms is None else f"{found.relative_rms:.4%}"
    return name, found.type, found.reference_type, error, rms, "" if found.sqnr_db is None else f"{found.sqnr_db:.2f}"
