"""`llmctl quantize`: methods and types, the report, and that the result is what was said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmctl.kernels.formats.codecs import dequantize
from llmctl.runtime.checkpoint import open_checkpoint


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, where files go that are not told otherwise."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def square(scripted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model with rows of 288 and 32 elements, all blocks whole, and weights worth rounding."""
    folder = tmp_path_factory.mktemp("models") / "square-1M"
    folder.mkdir()
    for file in scripted.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {"vocab_size": 288, "hidden_size": 288, "intermediate_size": 32, "head_dim": 32}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    rng, sizes = np.random.default_rng(9), {4: 32, 8: 32, config["vocab_size"] - 16: 288, 272: 288}
    shapes = {name: weight.shape for name, weight in load_file(folder / "model.safetensors").items()}
    weights = {name: rng.standard_normal([sizes[n] for n in shape]).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def types_of(path: Path | str) -> dict[str, str]:
    with open_checkpoint(path) as checkpoint:
        return {entry.name: entry.format.name for entry in checkpoint.entries() if "norm" not in entry.name}


@pytest.mark.parametrize(
    ("options", "type_name", "head"),
    [
        ([], "Q4_0", "Q8_0"),
        (["--method", "rtn", "--bits", "4"], "Q4_0", "Q8_0"),
        (["-m", "RTN", "-b", "8"], "Q8_0", "Q8_0"),
        (["--type", "q5_1"], "Q5_1", "Q8_0"),
        (["--bits", "4", "--type", "Q4_1"], "Q4_1", "Q8_0"),
        (["--bits", "4", "--type", "IQ4_NL"], "IQ4_NL", "Q8_0"),
        (["--bits", "4", "--pure"], "Q4_0", "Q4_0"),
    ],
)
def test_types(call: Callable[..., Any], square: Path, options: list[str], type_name: str, head: str) -> None:
    done = call("quantize", square, *options)
    assert done.code == 0, done.err
    assert done.out == f"square-1M-{type_name}.gguf\n" or done.out.endswith(f"-{type_name}.gguf\n")
    found = types_of(done.out.strip())
    assert found.pop("output.weight") == head
    assert set(found.values()) == {type_name}


def test_the_report_says_what_rounding_cost(call: Callable[..., Any], square: Path) -> None:
    done = call("quantize", square, "--bits", "4", "-o", "x.gguf", "--report", "report.json", "--json")
    report = json.loads(done.out)
    assert json.loads(Path("report.json").read_text("utf-8")) == report
    assert (report["command"], report["method"], report["pure"], report["type"]) == ("quantize", "rtn", False, "Q4_0")
    source, squares = load_file(square / "model.safetensors"), []
    with open_checkpoint("x.gguf") as checkpoint:
        for tensor in report["tensors"]:
            weight = source[tensor["source_name"]].astype(np.float64)
            if any(part in tensor["name"] for part in ("attn_q", "attn_k")):
                continue  # rows in another order; one head of 32
            rounded = dequantize(checkpoint.read(tensor["name"]))
            error = float(((weight - rounded) ** 2).sum())
            assert tensor["relative_rms_error"] == pytest.approx((error / (weight**2).sum()) ** 0.5, rel=1e-4, abs=1e-9)
            assert tensor["rms_error"] == pytest.approx((error / weight.size) ** 0.5, rel=1e-4, abs=1e-9)
            squares.append((error, (weight**2).sum()))
        assert report["totals"]["bits_per_weight"] == pytest.approx(8 * checkpoint.total_bytes / checkpoint.total_elements)
    assert report["totals"]["relative_rms_error"] == pytest.approx(
        (sum(error for error, _ in squares) / sum(total for _, total in squares)) ** 0.5, rel=0.2
    )
    assert report["types"]["Q4_0"]["tensors"] == 8
    assert sum(line["bytes"] for line in report["types"].values()) == report["totals"]["bytes"]


def test_the_table_goes_to_stderr(call: Callable[..., Any], square: Path) -> None:
    done = call("quantize", square, "-o", "x.gguf")
    assert done.out == "x.gguf\n"
    lines = done.err.splitlines()
    header = next(line for line in lines if "RMS ERROR" in line)
    assert header.split() == ["TENSORS", "OF", "KIND", "TYPE", "COUNT", "SIZE", "RMS", "ERROR", "WORST", "IN"]
    row = next(line for line in lines if line.startswith("blk.*.ffn_up.weight")).split()
    assert row[1:3] == ["Q4_0", "1"]
    assert row[-1] == "blk.0.ffn_up.weight"
    assert 5 < float(row[-2].rstrip("%")) < 15, "about 9 % for normally distributed weights at 4 bits"
    assert "bits per weight, relative RMS error" in lines[-1]
    assert call("quantize", square, "-o", "x.gguf", "--force", "--quiet") [:2] == (0, "x.gguf\n")


def test_from_gguf_the_second_rounding_is_said(call: Callable[..., Any], square: Path) -> None:
    call("quantize", square, "--bits", "8", "-o", "eight.gguf")
    done = call("quantize", "eight.gguf", "--bits", "4", "-o", "four.gguf", "--json")
    assert "8 tensors are quantized already (Q8_0) and rounded a second time" in done.err
    assert "blk.0.attn_q.weight" in json.loads(done.out)["requantized"]
    direct = call("quantize", square, "--bits", "4", "-o", "direct.gguf")
    assert "rounded a second time" not in direct.err
    assert types_of("four.gguf") == types_of("direct.gguf")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--method", "magic"], 2, "--method magic: there is no such method"),
        (["--method", "AWQ", "--bits", "8"], 1, "AWQ has 4-bit codes, these have 8"),
        (["--bits", "7"], 1, "--bits 7 is not there; bits of GGUF files are 2 (Q2_K), 3 (Q3_K_M), 4 (Q4_0), 5 (Q5_K_M)"),
        (["--bits", "four"], 2, "'--bits'"),
        (["--bits", "4", "--type", "Q8_0"], 2, "--bits 4 and --type Q8_0 contradict each other"),
        (["--bits", "8", "--type", "Q5_0"], 2, "--bits 8 and --type Q5_0 contradict each other"),
        (["--type", "F16"], 2, "--type F16 has no fewer bits; llmctl convert --type F16 writes it"),
        (["--type", "auto"], 2, "--type auto has no fewer bits"),
        (["--type", "IQ2_XS"], 1, "type 'IQ2_XS' can be read, but not written"),
        (["--type", "Q2_K_S"], 2, "Q2_K_S has too few bits to do without an importance matrix: give one with --imatrix"),
        (["-o", "x.gguf", "--report", "x.gguf"], 2, "--report and the output are the same file"),
        (["--report", "taken.json"], 1, "taken.json: exists already"),
        (["--report", "missing/r.json"], 1, "the folder missing does not exist"),
    ],
)
def test_errors_are_one_line(
    call: Callable[..., Any], square: Path, here: Path, options: list[str], code: int, message: str
) -> None:
    (here / "taken.json").write_text("precious")
    done = call("quantize", square, *options)
    assert (done.code, done.out) == (code, "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1
    assert [(path.name, path.read_text()) for path in here.iterdir()] == [("taken.json", "precious")]


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_a_damaged_source_is_refused_by_tensor(
    call: Callable[..., Any], square: Path, here: Path, tmp_path: Path, name: str
) -> None:
    """NaN in the source: rounding would spread it over its block."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in square.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights[name][..., 3] = np.nan
    save_file(weights, folder / "model.safetensors")
    done = call("quantize", folder)
    assert (done.code, done.out) == (1, "")
    assert f"tensor '{name}'" in done.err
    assert "weights must be finite, so the source is damaged" in done.err
    assert list(here.iterdir()) == []


def test_a_dry_run_plans_without_errors(call: Callable[..., Any], square: Path, here: Path) -> None:
    report = json.loads(call("quantize", square, "--dry-run", "--json").out)
    assert report["totals"]["relative_rms_error"] is None
    assert {tensor["type"] for tensor in report["tensors"]} == {"F32", "Q4_0", "Q8_0"}
    assert list(here.iterdir()) == []


def test_the_report_does_not_take_the_place_of_the_output_under_another_name(call: Callable[..., Any], square: Path) -> None:
    Path("link").symlink_to("x.gguf")
    for existing in (False, True):
        done = call("quantize", square, "-o", "x.gguf", "--report", "link", "--force")
        assert (done.code, Path("x.gguf").exists()) == (2, existing), done.err
        assert "--report and the output are the same file" in done.err
        Path("x.gguf").write_bytes(b"")
