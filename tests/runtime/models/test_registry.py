"""docs/families.md says which families there are: it must say what the registry does."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmctl.runtime.models.registry import FAMILIES, family_by_model_type, family_by_name

PAGE = Path(__file__).parents[3] / "docs" / "families.md"


def rows() -> list[list[str]]:
    """The cells of the table, without its head."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_lists_the_registry() -> None:
    listed = [(name, tuple(types.split(", ")), arch) for name, types, arch, _, _ in rows()]
    assert listed == [(family.name, family.model_types, family.gguf_arch) for family in FAMILIES]
    assert all(models and apart for *_, models, apart in rows())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_name_of_a_family_finds_it(family) -> None:
    assert family_by_name(family.name) is family
    for model_type in family.model_types:
        assert family_by_model_type(model_type) is family
        assert family_by_name(model_type) is family
    assert family_by_name(family.gguf_arch).gguf_arch == family.gguf_arch
