"""Draws of tokens on a device, in plain torch and numpy: the same random numbers as the kernels in `_triton.py`."""

from __future__ import annotations

import numpy as np
import torch

_TOKENS, _CHANCES = 0, 1
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEYS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_WORD = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor, limits: torch.Tensor | None = None
) -> torch.Tensor:
    """logits [R, V]: a token drawn of each row, int64 [R]."""
    x, factors = logits.float(), torch.where(temperatures > 0, temperatures, 1.0)
    noise = _noise(seeds.numpy()[:, None], np.arange(logits.shape[1]), steps.numpy()[:, None])
    scores = torch.where((temperatures > 0)[:, None], x / factors[:, None] + noise, x)
    allowed = x > -torch.inf if limits is None else (x > -torch.inf) & (x >= limits[:, None])
    return scores.where(allowed, -torch.inf).argmax(1).where(~x.isnan().any(1), -1)


def verify(
    logits: torch.Tensor,
    drafted: torch.Tensor,
    odds: torch.Tensor | None,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [S, γ + 1, V], drafted [S, γ], odds [S, γ, V]: what comes of them [S, γ + 1], and how many there are [S]."""
    out, lengths = torch.full(logits.shape[:2], -1), torch.zeros(len(logits), dtype=torch.int32)
    places = steps.numpy()[:, None] + np.arange(logits.shape[1])
    noise = _noise(seeds.numpy()[:, None, None], np.arange(logits.shape[2]), places[..., None])
    chances = torch.from_numpy(uniform(seeds.numpy()[:, None], np.int64(0), places, _CHANCES))
    for s, temperature in enumerate(temperatures.tolist()):
        own = None if odds is None else odds[s]
        tokens = _verify(logits[s].float(), drafted[s].tolist(), own, temperature, noise[s], chances[s])
        out[s, : len(tokens)], lengths[s] = torch.tensor(tokens), len(tokens)
    return out, lengths


def _verify(
    logits: torch.Tensor,
    drafted: list[int],
    odds: torch.Tensor | None,
    temperature: float,
    noise: torch.Tensor,
    chances: torch.Tensor,
) -> list[int]:
    tokens: list[int] = []
    for place, x in enumerate(logits):
        draft = drafted[place] if place < len(drafted) else -1
        if x.isnan().any():
            return [*tokens, -1]
        if temperature == 0:
            tokens.append(int(x.argmax()))
            if tokens[-1] != draft:
                break
            continue
        p, q = (x / temperature).softmax(0), torch.zeros(len(x))
        if draft >= 0:
            q[draft] = 1.0
            q = q if odds is None else odds[place]
            if chances[place] * q[draft] < p[draft]:
                tokens.append(draft)
                continue
        left = (p - q).clamp(min=0)
        left = left if left.sum() > 0 else p
        tokens.append(int((left.log() + noise[place]).argmax()))
        break
    return tokens


def _noise(seeds: np.ndarray, tokens: np.ndarray, steps: np.ndarray) -> torch.Tensor:
    """Gumbel noise of these tokens; seeds and steps may have an axis before theirs."""
    return -(-torch.from_numpy(uniform(seeds, tokens, steps, _TOKENS)).log()).log()


def uniform(seeds: np.ndarray, tokens: np.ndarray, steps: np.ndarray, purpose: int) -> np.ndarray:
    """float32 within (0, 1), multiples of 2^-24: the first word of Philox 4×32-10."""
    seeds, *words = np.broadcast_arrays(seeds, tokens, steps, purpose, 0)
    words = [word.astype(np.uint64) & _WORD for word in words]
    keys = [seeds.astype(np.uint64) & _WORD, seeds.astype(np.uint64) >> _SHIFT]
    for _ in range(_ROUNDS):
        first, third = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [(third >> _SHIFT) ^ words[1] ^ keys[0], third & _WORD, (first >> _SHIFT) ^ words[3] ^ keys[1], first & _WORD]
        keys = [(key + step) & _WORD for key, step in zip(keys, _KEYS, strict=True)]
    return ((words[0] >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
