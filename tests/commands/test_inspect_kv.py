"""inspect-kv: the published sizes, windows, types that do not fit, and that nothing but the config is read."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from llmctl.cli import main
from llmctl.kernels.backend import capabilities
from llmctl.kernels.kv_types import KV_TYPES

GPT3 = ("--shape", "96,96,128", "-c", "2048", "--kv-type", "f16")


@pytest.fixture
def report(capsys):
    """The JSON document of an inspect-kv call."""

    def run(*arguments: object) -> dict:
        code = main(["inspect-kv", *map(str, arguments), "--json"])
        output = capsys.readouterr()
        assert (code, output.err) == (0, "")
        document = json.loads(output.out)
        assert document["version"] == 1
        return document

    return run


def totals(document: dict, kv_type: str = "f16") -> list[dict]:
    return [total for total in document["totals"] if total["kv_type"] == kv_type]


@pytest.fixture
def write_config(tmp_path):
    """Writes a bare config.json of the llama family, with changes."""

    def write(**changes: object):
        config = {
            "model_type": "llama",
            "vocab_size": 100,
            "hidden_size": 96,
            "intermediate_size": 128,
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 640,
        }
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**config, **changes}), encoding="utf-8")
        return file

    return write


# --- published figures ------------------------------------------------------------------------------------------------


def test_gpt3_175b(report):
    document = report(*GPT3, "--batch", "1,32")
    one, many = totals(document)
    assert one["largest_layer_bytes"] == 100_663_296  # 100.7 MB a layer
    assert one["allocated_bytes"] == one["least_bytes"] == 9_663_676_416  # 9.66 GB a request
    assert many["allocated_bytes"] == 309_237_645_312  # 309.2 GB for 32
    (kind,) = document["types"]
    assert (kind["kv_type"], kind["runs_here"], kind["bytes_per_token"]) == ("f16", True, 4_718_592)
    (group,) = document["layers"]
    assert group == {
        "count": 96,
        "num_kv_heads": 96,
        "head_dim": 128,
        "sliding_window": None,
        "latent": None,
        "bytes_per_token": {"f16": 49_152},
    }


def test_a_shape_by_name_is_the_shape(report):
    named, spelt = report("--shape", "gpt3-175b", "--batch", "1,32", "--kv-type", "f16"), report(*GPT3, "--batch", "1,32")
    assert named["totals"] == spelt["totals"]
    llama2, llama3 = (totals(report("--shape", name, "-c", "4096"))[0] for name in ("llama2-7b", "llama3-8b"))
    assert llama3["allocated_bytes"] * 4 == llama2["allocated_bytes"]


def test_what_fits_here(report, monkeypatch):
    from llmctl.runtime import machine

    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(1 << 40, 10_000_000_000, None))
    document = report(*GPT3, "--batch", "1,2")
    assert document["memory"] == {"free_bytes": 10_000_000_000, "weight_bytes": None}
    assert [total["fits"] for total in totals(document)] == [True, False]
    longest = document["types"][0]["longest_context"]
    assert longest // 16 == 10_000_000_000 // (16 * 4_718_592)
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(None, None, None))
    document = report(*GPT3)
    assert (document["types"][0]["longest_context"], totals(document)[0]["fits"]) == (None, None)


def test_weights_take_their_share_of_the_memory(report, smollm2_gguf, monkeypatch):
    from llmctl.runtime import machine

    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(1 << 40, 1 << 30, None))
    size = smollm2_gguf.stat().st_size
    assert report(smollm2_gguf)["memory"] == {"free_bytes": (1 << 30) - size, "weight_bytes": size}


def test_a_latent_cache_keeps_no_values(report, llmctl, write_config):
    from make_tiny_model import tiny_config

    config = tiny_config("deepseek_v3").to_dict()
    file = write_config(**{**config, "model_type": "deepseek_v3"})
    (group,) = report(file, "--kv-type", "f16")["layers"]
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert (group["num_kv_heads"], group["head_dim"], group["latent"]) == (1, width, config["kv_lora_rank"])
    assert group["bytes_per_token"]["f16"] == 2 * width
    assert f"a latent of {config['kv_lora_rank']} and a rotated key of" in llmctl("inspect-kv", file).stdout


def test_gpt3_175b_in_words(llmctl):
    done = llmctl("inspect-kv", *GPT3, "--batch", "32")
    assert done.returncode == 0
    row = done.stdout.splitlines()[-2].split()
    assert row[:-1] == ["f16", "2048", "32", "3.2", "GB", "309.2", "GB", "309.2", "GB"]
    assert "bytes = (96 layers x 2 sides x 96 heads x 128 numbers x tokens) x bytes of a number x sequences" in done.stdout


def test_grouped_heads_take_a_quarter(report):
    full, grouped = (totals(report("--shape", f"32,{heads},128", "-c", "4096"))[0] for heads in (32, 8))
    assert grouped["allocated_bytes"] * 4 == full["allocated_bytes"]


def test_block_types(report):
    types = {t["kv_type"]: t["bytes_per_token"] for t in report("--shape", "1,1,64")["types"]}
    assert types == {
        "f32": 512,
        "f16": 256,
        "bf16": 256,
        "fp8": 128,
        "q8_0": 2 * 2 * 34,
        "q5_1": 2 * 2 * 24,
        "q4_0": 2 * 2 * 18,
    }


# --- types, contexts, windows -----------------------------------------------------------------------------------------


def test_types_that_do_not_fit_the_head_are_shown_as_such(llmctl, report):
    document = report("--shape", "2,1,80", "-c", "100")
    missing = {t["kv_type"] for t in document["types"] if t["bytes_per_token"] is None}
    assert not any(t["runs_here"] for t in document["types"] if t["kv_type"] in missing)
    assert missing == {"q8_0", "q5_1", "q4_0"}
    total = totals(document, "q8_0")[0]
    assert (total["largest_layer_bytes"], total["allocated_bytes"], total["least_bytes"]) == (None, None, None)
    done = llmctl("inspect-kv", "--shape", "2,1,80", "--kv-type", "q8_0")
    assert done.returncode == 0
    assert done.stdout.count("does not fit") == 5
    assert "For heads of 80 there is no q8_0: blocks of 32 numbers" in done.stdout


def test_every_type_is_listed_and_those_that_run_here_are_marked(report):
    types = report("--shape", "1,1,32")["types"]
    assert [t["kv_type"] for t in types] == list(KV_TYPES)
    here = {name.lower() for c in capabilities() if c.op == "attention" and c.available for name in c.formats}
    assert {t["kv_type"] for t in types if t["runs_here"]} == here


def test_the_product_of_types_contexts_and_batches(report):
    document = report("--shape", "1,1,32", "--kv-type", "f16,Q8_0", "-c", "64-128*2", "-c", "300", "--batch", "1-3")
    seen = [(t["kv_type"], t["context"], t["batch"]) for t in document["totals"]]
    assert seen == [(t, c, b) for t in ("f16", "q8_0") for c in (64, 128, 300) for b in (1, 2, 3)]


def test_allocation_is_in_pages_and_the_least_is_not(report):
    (total,) = totals(report("--shape", "3,2,32", "-c", "100"))
    per_token = 3 * 2 * 2 * 32 * 2
    assert total["allocated_bytes"] == 112 * per_token
    assert total["least_bytes"] == 100 * per_token
    (three,) = totals(report("--shape", "3,2,32", "-c", "100", "--batch", "3"))
    assert three["allocated_bytes"] == 3 * 112 * per_token  # no two sequences share a page


def test_windows_count_only_what_can_still_be_seen(report):
    document = report("--shape", "5,1,256,512", "--shape", "1,1,256", "-c", "256,4096")
    per_layer = 2 * 256 * 2
    short, long = totals(document)
    assert short["least_bytes"] == short["allocated_bytes"] == 6 * 256 * per_layer
    windowed = 33 * 16 + 16 + 512  # the window in pages, one page more, a step of the prompt
    assert long["allocated_bytes"] == (5 * windowed + 4096) * per_layer
    assert long["least_bytes"] == (5 * 512 + 4096) * per_layer
    assert [(g["count"], g["sliding_window"]) for g in document["layers"]] == [(5, 512), (1, None)]


# --- where the layers come from ---------------------------------------------------------------------------------------


def test_a_bare_config(report, write_config):
    document = report(write_config())
    assert (document["num_layers"], document["max_context"]) == (5, 640)
    assert totals(document)[0]["context"] == 640
    assert totals(document)[0]["allocated_bytes"] == 640 * 5 * 2 * 2 * 32 * 2


def test_a_folder_without_weights(report, write_config):
    file = write_config()
    assert report(file.parent)["layers"] == report(file)["layers"]


def test_a_gguf_file(report, gemma3_gguf):
    document = report(gemma3_gguf, "-c", "32768", "--kv-type", "f16")
    assert [(g["count"], g["num_kv_heads"], g["head_dim"], g["sliding_window"]) for g in document["layers"]] == [
        (15, 1, 256, 512),
        (3, 1, 256, None),
    ]
    (total,) = totals(document)
    assert total["allocated_bytes"] == (15 * (33 * 16 + 16 + 512) + 3 * 32768) * 1024
    assert total["least_bytes"] == (15 * 512 + 3 * 32768) * 1024


@pytest.mark.parametrize("windows", [(None,) * 3, (64, 64, None, 64), (32, 32)])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_figure_is_what_the_engine_allocates(stub_engine_bytes, report, windows, batch):
    shapes = [argument for w in windows for argument in ("--shape", f"1,2,32{'' if w is None else f',{w}'}")]
    for context in (100, 3000):
        document = report(*shapes, "-c", context, "--batch", batch, "--kv-type", "f32")
        assert totals(document, "f32")[0]["allocated_bytes"] == stub_engine_bytes(context, windows, batch)


@pytest.mark.parametrize("kv_type", ["f16", "fp8", "q5_1", "k=q8_0,v=q4_0"])
def test_the_native_backend_takes_those_bytes(report, kv_type):
    """Real pages: 2 kv heads of 64, of which some layers see 100 tokens."""
    from types import SimpleNamespace

    from llmctl.kernels._native import NativeOps
    from llmctl.runtime.cache.kv_cache import KvCache
    from llmctl.runtime.cache.memory import Demand, LayerShape, plan_cache

    layers = [LayerShape(2, 64, 100), LayerShape(2, 64)]
    pages = []
    ops = SimpleNamespace(kv_pages=lambda *arguments: pages.append(NativeOps(1).kv_pages(*arguments)))
    KvCache(ops, layers, plan_cache(layers, kv_type, Demand(2000)), kv_type)
    document = report("--shape", "1,2,64,100", "--shape", "1,2,64", "-c", "2000", "--kv-type", kv_type)
    assert totals(document, kv_type)[0]["allocated_bytes"] == sum(each.nbytes for each in pages)


@pytest.fixture
def stub_engine_bytes():
    """Bytes of the arrays that a real Engine asks its backend for."""
    from types import SimpleNamespace

    from llmctl.runtime.cache.memory import LayerShape
    from llmctl.runtime.cache.policy import FULL
    from llmctl.runtime.engine import Engine

    def measure(context: int, windows: tuple[int | None, ...], batch: int) -> int:
        sizes = []

        def kv_pages(blocks: int, block_size: int, num_kv_heads: int, head_dim: int, kv_type: str, latent: int) -> None:
            assert (kv_type, latent) == ("f32", 0)
            sizes.append(2 * 4 * blocks * block_size * num_kv_heads * head_dim)

        layers = tuple(LayerShape(2, 32, window) for window in windows)
        ops = SimpleNamespace(kv_pages=kv_pages, is_row_invariant=True, compile=lambda forward, frequencies: None)
        decoder = SimpleNamespace(tables=SimpleNamespace(ropes=()))
        model = SimpleNamespace(
            context_length=context,
            max_cache_bytes=None,
            ops=ops,
            kv_layers=lambda context=None: layers,
            kv_type="f32",
            kv_policy=FULL,
            decoder=decoder,
        )
        Engine(model, max_num_seqs=batch)
        return sum(sizes)

    return measure


def test_no_model_means_the_default_one(llmctl, write_config):
    done = llmctl("inspect-kv", env={"LLMCTL_MODEL": str(write_config())})
    assert done.returncode == 0
    assert "config.json" in done.stderr
    assert done.stdout.splitlines()[0].endswith("config.json: 5 layers, trained with 640 tokens")


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--shape", "1,2"], 2, "expected LAYERS,KV_HEADS,HEAD_DIM"),
        (["--shape", "1,2,x"], 2, "expected LAYERS,KV_HEADS,HEAD_DIM"),
        (["--shape", "1,0,64"], 2, "kv heads must be 1 to"),
        (["--shape", "1000000000,1,64"], 2, "layers must be 1 to"),
        (["--shape", "1,1,64,0"], 2, "window must be 1 to"),
        (["--shape", "1,1,64", "--kv-type", "q9"], 2, "expected f32, f16"),
        (["--shape", "1,1,64", "-c", "0"], 2, "--ctx-size must be at least 1, found 0"),
        (["--shape", "1,1,64", "-c", "many"], 2, "expected a whole number"),
        (["--shape", "1,1,64", "--batch", "4-2"], 2, "never ends or is empty"),
        (["model.gguf", "--shape", "1,1,64"], 2, "either MODEL or --shape"),
        (["--shape", "gpt5"], 2, "or one of gpt3-175b"),
        (["--shape", "1,1,64", "--view", "live"], 2, "the live view needs a text"),
        (["--shape", "1,1,64", "--view", "pages"], 2, "there is no such view; expected plan, live, attention, what-if"),
        (["--shape", "1,1,64", "--max-memory", "2G"], 2, "the what-if view needs a text"),
        (["--shape", "1,1,64", "-p", "Hello"], 2, "either MODEL or --shape"),
        (["--shape", "1,1,64", "-o", "x.txt"], 2, "expected a name that ends in .html"),
        (["--shape", "1,1,64", "-o", "x.png"], 2, "the picture is of the attention view"),
        (["--shape", "1,1,64", "-o", "nowhere/x.html"], 1, "the folder nowhere does not exist"),
        (["missing.gguf"], 1, "missing.gguf: no such file"),
    ],
)
def test_refusals(capsys, arguments, code, words):
    assert main(["inspect-kv", *arguments]) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert words in output.err
    assert len(output.err.splitlines()) == 1


def test_an_unknown_architecture_is_named_with_the_way_out(llmctl, write_config):
    done = llmctl("inspect-kv", write_config(model_type="qwen9"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "qwen9" in done.stderr
    assert "--shape LAYERS,KV_HEADS,HEAD_DIM" in done.stderr


def test_torch_is_not_imported(smollm2_gguf):
    code = (
        "import sys; from llmctl.cli import main; code = main(['inspect-kv', sys.argv[1], '--json']); "
        "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(smollm2_gguf)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_layers"] == 30


@pytest.mark.parametrize("option", [("--kv-policy", "snapkv"), ("--kv-budget", "0.5"), ("-n", "3")])
def test_what_is_about_a_text_is_refused_without_one(llmctl, option):
    done = llmctl("inspect-kv", "--shape", "2,1,64", *option)
    assert done.returncode == 2
    assert "is about a text, not the plan" in done.stderr
