"""Which texts have pages in the cache: a tree with one node for every page of tokens that follows another one.

A node's children are found by the hash of their tokens and then compared token by token, and a text is looked up from its
beginning. So whatever is found is exactly that text: no two texts can be taken for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter


class PrefixNode:
    """A page's tokens after those of its parent, fewer than a page has where a text ended there.

    pages: group → page that holds them. pins: sequences that will put a child below this node; it stays in the tree while there
    are any.
    """

    __slots__ = ("children", "pages", "parent", "pins", "tokens")

    def __init__(self, parent: PrefixNode | None = None, tokens: tuple[int, ...] = ()) -> None:
        self.parent, self.tokens = parent, tokens
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.pages: dict[int, int] = {}
        self.pins = 0

    def child(self, tokens: tuple[int, ...]) -> PrefixNode:
        """The node of these tokens after this one's, made if there is none."""
        return self.children.setdefault(tokens, PrefixNode(self, tokens))

    def find(self, token_ids: list[int], block_size: int, most: int) -> list[PrefixNode]:
        """The nodes of a text from its beginning on (this node is the root), at most `most`."""
        found, node = [], self
        while len(found) < most:
            begin = len(found) * block_size
            following = node.children.get(tuple(token_ids[begin : begin + block_size]))
            if following is None:
                break
            node = following
            found.append(node)
        return found

    def find_beginning(self, tokens: list[int], groups: int) -> tuple[PrefixNode, int]:
        """The child whose tokens begin like these for longest, of those with a page in so many groups, and for how many; this
        node and 0 where none does."""
        best: tuple[PrefixNode, int] = (self, 0)
        for child in self.children.values():
            if tokens and child.tokens[0] == tokens[0] and len(child.pages) == groups:
                best = max(best, (child, _common(child.tokens, tokens)), key=itemgetter(1))
        return best

    def prune(self) -> None:
        """Leave the tree, and so do the parents, where nothing is kept any more."""
        node = self
        while node.parent is not None and not (node.pages or node.children or node.pins):
            del node.parent.children[node.tokens]
            node = node.parent


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
