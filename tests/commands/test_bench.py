"""llmctl bench: the tests a command line means, and llama-bench's columns and keys."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess

import pytest
from make_tiny_model import make_tiny_model

from llmctl.commands.bench import _model_type
from llmctl.kernels.backend import default_kv_type
from llmctl.runtime.loading import open_model

HEADER = (
    "| model                          |       size |     params | backend    | threads "
    "|            test |                  t/s |"
)
RULE = (
    "| ------------------------------ | ---------: | ---------: | ---------- | ------: "
    "| --------------: | -------------------: |"
)
LLAMA_BENCH_KEYS = (
    *("build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size"),
    *("model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask", "cpu_strict", "poll", "type_k", "type_v"),
    *("n_gpu_layers", "n_cpu_moe", "split_mode", "main_gpu", "no_kv_offload", "flash_attn", "devices", "tensor_split"),
    *("tensor_buft_overrides", "load_mode", "lazy_mode", "embeddings", "no_op_offload", "no_host", "repack", "fit_target"),
    *("fit_min_ctx", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts"),
)
QUICK = ("-r", "1", "--no-warmup", "-q")


def names(done) -> list[str]:
    return [line.split("|")[-3].strip() for line in done.out.splitlines()[2:]]


def test_the_table_is_llama_benchs(call, scripted):
    done = call("bench", scripted, "-p", "16", "-n", "2", "-r", "2")
    assert done.code == 0
    header, rule, *rows = done.out.splitlines()
    assert (header, rule) == (HEADER, RULE)
    assert len(rows) == 2
    elements = 272 * 272 * 2 + 272 * 3 + 4 * 8 * 272 + 3 * 4 * 272
    for row, name in zip(rows, ("pp16", "tg2"), strict=True):
        assert len(row) == len(HEADER)
        model, size, params, backend, threads, test, rate = (cell.strip() for cell in row.strip("|").split("|"))
        assert (model, size, params) == ("llama 161K F32", f"{4 * elements / 2**20:.2f} MiB", f"{elements / 1e6:.2f} M")
        assert (backend, test) == ("native", name)
        assert int(threads) >= 1
        assert re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", rate)
    assert done.err == "scripted pp16\nscripted tg2\n"


def test_lists_ranges_depths_and_pairs_in_llama_benchs_order(call, scripted):
    done = call("bench", scripted, "-p", "8-16*2,4", "-n", "1", "-n", "2", "-d", "0,8", "-pg", "8,2", "-pg", "4,0", *QUICK)
    tests = ["pp8", "pp16", "pp4", "tg1", "tg2", "pp8+tg2", "pp4"]
    assert names(done) == [*tests, *(f"{test} @ d8" for test in tests)]
    assert done.err == ""


def test_zero_leaves_a_kind_out(call, scripted):
    assert names(call("bench", scripted, "-p", "0", "-n", "2", *QUICK)) == ["tg2"]
    assert names(call("bench", scripted, "-p", "2", "-n", "0", *QUICK)) == ["pp2"]
    assert names(call("bench", scripted, "-p", "0", "-n", "0", "-pg", "2,1", *QUICK)) == ["pp2+tg1"]


def test_the_defaults(call, scripted):
    rows = json.loads(call("bench", scripted, "-q", "-o", "json").out)
    assert [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows] == [(512, 0, 0), (0, 128, 0)]
    assert all(len(row["samples_ns"]) == 5 for row in rows)


def test_json_has_llama_benchs_keys_and_our_version(call, scripted):
    done = call("bench", scripted, "-p", "16", "-n", "2", "-d", "4", "-r", "3", "-o", "json")
    rows = json.loads(done.out)
    assert [row["version"] for row in rows] == [1, 1]
    for row in rows:
        assert set(LLAMA_BENCH_KEYS) <= set(row)
        assert (row["n_gpu_layers"], row["flash_attn"], row["embeddings"], row["poll"]) == (0, 0, False, None)
        assert row["model_filename"] == str(scripted)
        kept = default_kv_type("native")
        assert (row["type_k"], row["type_v"], row["dtype"], row["devices"]) == (kept, kept, "float32", "cpu")
        assert row["activations"] == "int8"
        assert (row["n_depth"], row["n_batch"]) == (4, 512)
        assert row["n_prompt"] + row["n_gen"] in (16, 2)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["test_time"])
        assert len(row["samples_ns"]) == len(row["samples_ts"]) == 3
        tokens = row["n_prompt"] + row["n_gen"]
        assert row["samples_ts"] == pytest.approx([1e9 * tokens / ns for ns in row["samples_ns"]])
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 3)
        assert row["avg_ns"] == sum(row["samples_ns"]) // 3


def test_the_other_forms_say_the_same(call, scripted):
    arguments = ("bench", scripted, "-p", "8", "-n", "2", *QUICK)
    lines = [json.loads(line) for line in call(*arguments, "-o", "jsonl").out.splitlines()]
    assert [(line["version"], line["n_prompt"], line["n_gen"]) for line in lines] == [(1, 8, 0), (1, 0, 2)]
    table = list(csv.DictReader(io.StringIO(call(*arguments, "-o", "csv").out)))
    assert [(row["n_prompt"], row["n_gen"]) for row in table] == [("8", "0"), ("0", "2")]
    assert set(LLAMA_BENCH_KEYS) <= set(table[0])
    one = json.loads(call(*arguments, "--json").out)
    assert one["version"] == 1
    assert [(row["n_prompt"], row["n_gen"]) for row in one["tests"]] == [(8, 0), (0, 2)]


def test_several_models_and_repetitions(call, scripted, untemplated):
    rows = json.loads(call("bench", scripted, untemplated, "-p", "4", "-n", "0", "-r", "1,2", "-q", "-o", "json").out)
    seen = [(row["model_filename"], len(row["samples_ns"])) for row in rows]
    assert seen == [(str(model), count) for model in (scripted, untemplated) for count in (1, 2)]


def test_threads_are_really_set(call, scripted):
    import torch

    before = torch.get_num_threads()
    try:
        done = call("bench", scripted, "-p", "4", "-n", "0", "-t", "1,3", "-o", "jsonl", "--backend", "reference", *QUICK)
        assert [json.loads(line)["n_threads"] for line in done.out.splitlines()] == [1, 3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_number_types_show_when_they_are_not_the_usual_ones(call, scripted):
    few = ("-p", "4", "-n", "0", *QUICK)
    done = call("bench", scripted, *few, "--backend", "reference", "--dtype", "bfloat16", "--kv-type", "f16")
    header, _, row = done.out.splitlines()
    assert [cell.strip() for cell in header.split("|")][5:9] == ["threads", "dtype", "type_k", "type_v"]
    assert [cell.strip() for cell in row.split("|")][6:9] == ["bfloat16", "f16", "f16"]
    header, _, row = call("bench", scripted, *few, "--activations", "float", "--kv-type", "f32").out.splitlines()
    assert [cell.strip() for cell in header.split("|")][5:9] == ["threads", "type_k", "type_v", "activations"]
    assert [cell.strip() for cell in row.split("|")][6:9] == ["f32", "f32", "float"]


def test_a_gguf_is_named_as_llama_bench_would(smollm2_gguf):
    opened = open_model(smollm2_gguf)
    assert _model_type(opened) == "llama 135M Q4_1"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-p", "0", "-n", "0"], 2, "nothing to measure"),
        (["-p", "0", "-n", "0", "-pg", "0,0"], 2, "nothing to measure"),
        (["-p", "x"], 2, "-p: expected a whole number"),
        (["-n", "8-4"], 2, "-n: the range 8-4 never ends or is empty"),
        (["-r", "0"], 2, "-r must be at least 1"),
        (["-t", "0"], 2, "-t must be at least 1"),
        (["-pg", "512"], 2, "expected two numbers"),
        (["-pg", "512,x"], 2, "expected two numbers"),
        (["-o", "xml"], 2, "--output"),
        (["-o", "md", "--json"], 2, "choose one"),
        (["-p", "20000", "-n", "0"], 1, "pp20000 needs a context of 20001 tokens, the model has 20000"),
        (["-p", "4", "-n", "8", "-d", "19999"], 1, "pp4 @ d19999 needs a context of 20004 tokens"),
    ],
)
def test_refusals(call, scripted, arguments, code, words):
    done = call("bench", scripted, *arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert len(done.err.splitlines()) == 1


def test_a_missing_model_stops_before_anything_is_measured(call, scripted, tmp_path):
    done = call("bench", scripted, tmp_path / "missing.gguf")
    assert (done.code, done.out) == (1, "")
    assert "missing.gguf: no such file" in done.err


def test_ctrl_c_leaves_the_rows_there_are(llmctl_script, scripted):
    command = [llmctl_script, "bench", scripted, "-p", "1", "-n", "15000", "--no-warmup", "-r", "1", "-t", "1"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        seen = b""
        while b"pp1 |" not in seen:
            seen += os.read(process.stdout.fileno(), 4096)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert len((seen + rest).splitlines()) == 3
    assert b"Traceback" not in err


def test_experts_are_counted_and_what_a_token_reads_is_said(call, tmp_path):
    path = make_tiny_model(tmp_path / "sparse", "qwen3_moe", use_sliding_window=False)
    done = call("bench", path, "-p", "20", "-n", "0", "-o", "json", *QUICK)
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)
    first, last = row["expert_tokens"]  # of layers 0 and 2: layer 1 has no experts
    assert (len(first), sum(first)) == (8, 3 * 20)
    assert sum(last) < sum(first)  # past the last attention only tokens go on whose logits are wanted
    assert 0 < row["active_params"] < row["model_n_params"]
    assert row["active_bytes"] == 4 * row["active_params"]
