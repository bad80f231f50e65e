#!/usr/bin/env python3
"""Record what transformers answers for the two real models: the reference of tests/runtime/models/test_golden.py.

    python scripts/make_golden.py MODELS            # MODELS as filled by `get_models.py MODELS --fp16`

For each model × source (the GGUF dequantized by transformers, the float16 folder), in float32 with eager attention and
a float32 cache, on ten prompts: prompt ids, logits at chosen positions, and the greedy continuation with the margin of
every choice. Writes tests/golden/MODEL.json (prompts, continuations, versions) and MODEL-SOURCE.npz (logits) there.
A prompt whose greedy choice is closer than MIN_MARGIN anywhere is refused: such a test would be a coin flip.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from get_models import FP16_FOLDERS, gguf_name

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
SOURCES = ("gguf", "fp16")
MAX_NEW_TOKENS = 64
TOP, SAMPLED = 64, 64
MIN_MARGIN = 2e-3  # two logits may each be off by the 1e-3 the tests allow
WINDOW = 512  # Gemma's sliding window: positions around it are recorded


@dataclass(frozen=True)
class Prompt:
    """Plain text, or messages for the model's chat template."""

    name: str
    text: str | None = None
    messages: list[dict[str, str]] | None = None


def _declaration(words: int) -> str:
    """The first words of a public domain text long enough to leave the sliding window behind."""
    return " ".join((GOLDEN / "declaration.txt").read_text(encoding="utf-8").split(" ")[:words])


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


CODE = '''def fibonacci(n: int) -> int:
    """Return the n-th Fibonacci number."""
    if n < 2:
        return n
    return fibonacci(n - 1) + fibonacci(n - 2)


def factorial(n: int) -> int:
'''

PROMPTS = {
    "smollm2": [
        Prompt("chat", messages=[_user("What is the capital of France?")]),
        Prompt(
            "chat_turns",
            messages=[
                {"role": "system", "content": "You answer in one short sentence."},
                _user("Name a planet."),
                {"role": "assistant", "content": "Mars."},
                _user("And what colour is it?"),
            ],
        ),
        Prompt("one_token", "The"),
        Prompt("long", _declaration(620)),
        Prompt("chinese", "北京是中国的首都。上海是"),
        Prompt("arabic", "عاصمة مصر هي القاهرة، وعاصمة فرنسا هي"),
        Prompt("emoji", "🍎 apple\n🍌 banana\n🍇 grapes\n🍓"),
        Prompt("code", CODE),
        Prompt("german", "Die Hauptstadt von Deutschland ist"),
        Prompt("numbers", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"),
    ],
    "gemma3-270m": [
        Prompt("short", "The capital of France is"),
        Prompt("one_token", ""),
        Prompt("long", _declaration(620)),
        Prompt("crossing", _declaration(420)),
        Prompt("chinese", "北京是中国的首都。上海是"),
        Prompt("japanese", "吾輩は猫である。名前はまだ無い。"),
        Prompt("arabic", "كان يا ما كان في قديم الزمان"),
        Prompt("emoji", "🍎 apple\n🍌 banana\n🍇 grapes\n🍓"),
        Prompt("code", CODE),
        Prompt("russian", "Все счастливые семьи похожи друг на друга,"),
    ],
}


def load(models: Path, model: str, source: str):
    """The tokenizer and the float32 eager model of one source, as transformers reads it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    if source == "gguf":
        where, named = models, {"gguf_file": gguf_name(model)}
        how["quantization_config"] = GgufConfig(dequantize=True)
    else:
        where, named = models / FP16_FOLDERS[model], {}
    tokenizer = AutoTokenizer.from_pretrained(where, **named)
    return tokenizer, AutoModelForCausalLM.from_pretrained(where, **named, **how).eval()


def encode(tokenizer, prompt: Prompt) -> list[int]:
    """The prompt's ids, through the chat template (with the generation prompt) where it is a conversation."""
    if prompt.messages is not None:
        return tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    return tokenizer(prompt.text).input_ids


def chosen_positions(length: int) -> list[int]:
    """Positions whose logits are kept: the ends, the middle, and both sides of the sliding window."""
    wanted = [0, 1, length // 4, length // 2, WINDOW - 1, WINDOW, WINDOW + 1, length - 2, length - 1]
    return sorted({p for p in wanted if 0 <= p < length})


def record_logits(model, ids: list[int]) -> dict[str, np.ndarray]:
    """Logits of one full forward: at each chosen position the top ids and a strided sample, and the log-sum of all.

    positions [P] int32, ids [P, TOP + SAMPLED] int32, logits the same shape float32, logsumexp [P] float64.
    """
    import torch

    positions = chosen_positions(len(ids))
    with torch.no_grad():
        rows = model(torch.tensor([ids]), use_cache=False).logits[0, positions].numpy()
    kept = []
    for row, position in zip(rows, positions, strict=True):
        stride = len(row) // SAMPLED
        sample = np.arange(SAMPLED) * stride + position % stride
        kept.append(np.concatenate([np.argsort(-row, kind="stable")[:TOP], sample]))
    chosen = np.array(kept, dtype=np.int32)
    total = np.logaddexp.reduce(rows.astype(np.float64), axis=1)
    return {
        "positions": np.array(positions, dtype=np.int32),
        "ids": chosen,
        "logits": np.take_along_axis(rows, chosen, axis=1),
        "logsumexp": total,
    }


def record_greedy(model, ids: list[int]) -> tuple[list[int], list[float]]:
    """The greedy continuation (end token included, where it comes) and how far ahead each choice was of the second."""
    import torch

    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [torch.topk(step[0], 2).values for step in out.logits]
    return out.sequences[0, len(ids) :].tolist(), [float(top - second) for top, second in best]


def record_prompt(tokenizer, model, prompt: Prompt) -> tuple[list[int], dict[str, object], dict[str, np.ndarray]]:
    """One prompt's ids, its greedy continuation, and its logits (see `record_logits`)."""
    ids = encode(tokenizer, prompt)
    logits = record_logits(model, ids)
    greedy, margins = record_greedy(model, ids)
    text = tokenizer.decode(greedy, skip_special_tokens=True)
    return ids, {"greedy": greedy, "text": text, "margins": [round(m, 5) for m in margins]}, logits


def record_source(models: Path, name: str, source: str, prompts: dict[str, dict], kept: dict[str, dict]) -> None:
    """Run one model from one source over its prompts; fill `prompts` and write the logits file.

    kept: earlier entries that may be taken over, with the logits in the file that is about to be replaced.
    """
    target = GOLDEN / f"{name}-{source}.npz"
    earlier = np.load(target) if kept else {}
    arrays = {key: earlier[key] for key in earlier if key.partition("/")[0] in kept}
    tokenizer, model = load(models, name, source)
    for prompt in PROMPTS[name]:
        if prompt.name in kept:
            prompts[prompt.name] = kept[prompt.name]
            continue
        ids, answer, logits = record_prompt(tokenizer, model, prompt)
        entry = prompts.setdefault(prompt.name, {"text": prompt.text, "messages": prompt.messages, "ids": ids})
        if entry["ids"] != ids:
            raise SystemExit(f"{name}, {prompt.name}: the two sources' tokenizers disagree")
        entry[source] = answer
        arrays |= {f"{prompt.name}/{key}": value for key, value in logits.items()}
        print(f"{name} {source} {prompt.name}: least margin {min(answer['margins']):.4f}", file=sys.stderr)
    np.savez_compressed(target, **arrays)


def reusable(name: str, made: dict[str, object]) -> dict[str, dict]:
    """Recorded prompts that say the same text and were made by the same versions from the same file."""
    recorded = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    if recorded["header"] != made:
        return {}
    asked = {prompt.name: (prompt.text, prompt.messages) for prompt in PROMPTS[name]}
    entries = recorded["prompts"].items()
    return {key: entry for key, entry in entries if asked.get(key) == (entry["text"], entry["messages"])}


def refuse_coin_flips(name: str, prompts: dict[str, dict]) -> None:
    """SystemExit naming every prompt with a greedy choice too close to call."""
    close = [
        f"{prompt} ({source}: {min(entry[source]['margins'])})"
        for prompt, entry in prompts.items()
        for source in SOURCES
        if min(entry[source]["margins"]) < MIN_MARGIN
    ]
    if close:
        raise SystemExit(f"{name}: margins below {MIN_MARGIN}, choose other prompts: {', '.join(close)}")


def header(models: Path, name: str) -> dict[str, object]:
    """What made the file: versions, settings, and the sha256 of the GGUF both sources come from."""
    import hashlib

    import torch
    import transformers

    digest = hashlib.sha256((models / gguf_name(name)).read_bytes()).hexdigest()
    return {
        "made_by": "scripts/make_golden.py",
        "gguf": gguf_name(name),
        "gguf_sha256": digest,
        "settings": f"float32 weights and cache, eager attention, greedy up to {MAX_NEW_TOKENS} tokens",
        "versions": {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "machine": platform.machine(),
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """Record both models from both sources."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="folder filled by get_models.py --fp16")
    parser.add_argument("--only", choices=sorted(PROMPTS), help="record one model only")
    parser.add_argument("--changed", action="store_true", help="keep prompts recorded before with the same versions")
    options = parser.parse_args(arguments)
    for name in [options.only] if options.only else PROMPTS:
        prompts: dict[str, dict] = {}
        made = header(options.models, name)
        kept = reusable(name, made) if options.changed else {}
        for source in SOURCES:
            record_source(options.models, name, source, prompts, kept)
        content = {"header": made, "prompts": prompts}
        (GOLDEN / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        refuse_coin_flips(name, prompts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
