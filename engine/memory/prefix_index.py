"""The prefix index: which pages hold which tokens, for every sequence that was evaluated.

A tree of pages under each root. A node stands for one page and is found by its parent and its
tokens, so a path from the root is a chain of keys that names a prefix; the dictionaries compare
whole keys, so a match is proven and never a collision of hashes. The index is one holder of each
page that it lists: slots share whole pages with it, and copy the page in which they diverge.

Nodes whose page was taken for something else live on in host memory while that has room. Least
recently used goes first, in both places, and children always before their parents. Knows pages and
tokens; slots, requests and what a page holds are not its business.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from engine.memory.checkpoint import Checkpoint
from engine.memory.host_tier import HostTier
from engine.memory.pages import PageAllocator, PoolCorruption
from engine.step import PageContent

_TOKEN_BYTES = 4


@dataclass(frozen=True)
class PrefixRoot:
    """What prefixes must agree in before their tokens are compared.

    `model` is the model's fingerprint, `adapters` the key of the effective adapter set (b"" for
    none), `tenant` the salt that keeps tenants apart.
    """

    model: bytes
    kv_dtype: str
    adapters: bytes
    tenant: str


@dataclass(eq=False, slots=True)  # there is one for every page of the host tier
class PageNode:
    """One page of a prefix. `key` is its tokens (`encode`), fewer than a page at the very end.

    `page_id` is 0 while `content` holds the page on the host. `checkpoints` are where a sequence
    through this page can be continued.
    """

    parent: PageNode | None = field(repr=False)
    key: bytes
    page_id: int
    content: PageContent | None = field(default=None, repr=False)
    children: dict[bytes, PageNode] = field(default_factory=dict[bytes, "PageNode"], repr=False)
    order: list[bytes] = field(default_factory=list[bytes], repr=False)
    checkpoints: list[Checkpoint] = field(default_factory=list[Checkpoint])

    @property
    def num_tokens(self) -> int:
        """Tokens of the page that the node vouches for."""
        return len(self.key) // _TOKEN_BYTES

    @property
    def is_on_host(self) -> bool:
        """True while the page lies in host memory."""
        return self.content is not None


@dataclass(frozen=True)
class Match:
    """The longest prefix of some tokens that the index holds.

    `nodes` are the pages of it; of the last one only the first tokens may be in the prefix.
    """

    nodes: tuple[PageNode, ...]
    num_tokens: int


def encode(tokens: Sequence[int]) -> bytes:
    """Returns tokens as bytes that compare like the tokens."""
    return np.asarray(tokens, ">u4").tobytes()


class PrefixIndex:
    """All prefixes of one kv pool."""

    def __init__(self, pages: PageAllocator, page_tokens: int, host: HostTier) -> None:
        self._pages = pages
        self._page_bytes = page_tokens * _TOKEN_BYTES
        self.host_tier = host
        self._roots: dict[PrefixRoot, PageNode] = {}
        # In order of use, oldest first; a child is never younger than its parent.
        self._on_device: dict[PageNode, None] = {}
        self._on_host: dict[PageNode, None] = {}
        self._kept: set[PageNode] = set()

    @property
    def num_host_nodes(self) -> int:
        """Pages in host memory."""
        return len(self._on_host)

    @property
    def num_tokens(self) -> int:
        """Tokens of all pages, on the device and on the host."""
        return sum(node.num_tokens for node in (*self._on_device, *self._on_host))

    def device_nodes(self) -> list[PageNode]:
        """Returns the pages on the device, least recently used first."""
        return list(self._on_device)

    def renumber(self, ids: Mapping[int, int]) -> None:
        """Follows the pool, in which every page has another id."""
        for node in self._on_device:
            node.page_id = ids[node.page_id]

    def held_pages(self) -> list[int]:
        """Returns the pages of which the index is a holder."""
        return [node.page_id for node in self._on_device]

    def listed_pages(self) -> Iterator[tuple[PrefixRoot, int]]:
        """Yields the pages on the device, each with the root that it belongs to."""
        for name, root in self._roots.items():
            yield from ((name, n.page_id) for n in _descendants(root) if not n.is_on_host)

    def match(self, root: PrefixRoot, key: bytes) -> Match:
        """Returns the longest held prefix of encoded tokens, which may end inside a page."""
        node = self._roots.get(root)
        if node is None:
            return Match((), 0)
        nodes: list[PageNode] = []
        at = 0
        while (child := node.children.get(key[at : at + self._page_bytes])) is not None:
            nodes.append(child)
            node = child
            at += len(child.key)
        shared = 0
        if at % self._page_bytes == 0:
            closest, shared = _closest(node, key[at : at + self._page_bytes])
            nodes += [closest] if closest else []
        return Match(tuple(nodes), at // _TOKEN_BYTES + shared)

    def insert(self, root: PrefixRoot, key: bytes, pages: list[int], nodes: list[PageNode]) -> None:
        """Lists the pages of a sequence.

        `nodes` are those of its first pages that are listed already, and grow in place. Where the
        same tokens lie in another page, `pages` gets that one and the sequence's own is released.
        A page of which only the beginning is filled is listed too: its owner may go on writing
        behind what the node vouches for.
        """
        moved = self._take_off_partial(key, nodes)
        parent = nodes[-1] if nodes else self._root(root)
        for index in range(len(nodes), -(-len(key) // self._page_bytes)):
            part = key[index * self._page_bytes : (index + 1) * self._page_bytes]
            child = parent.children.get(part)
            if child is None:
                child = self._add(parent, part, pages[index])
            elif child.is_on_host:
                self.lift(child, pages[index])
            elif child.page_id != pages[index]:
                if len(part) < self._page_bytes:
                    break  # its owner will write on in it
                self._pages.share([child.page_id])
                self._pages.release([pages[index]])
                pages[index] = child.page_id
            nodes.append(child)
            parent = child
        for checkpoint in moved:
            if not self.attach(nodes, checkpoint):
                checkpoint.drop()
        self.touch(nodes)

    def attach(self, nodes: Sequence[PageNode], checkpoint: Checkpoint) -> bool:
        """Lists where the sequence through `nodes` can be continued; False if it is not listed."""
        page_tokens = self._page_bytes // _TOKEN_BYTES
        index = (checkpoint.position - 1) // page_tokens
        if index >= len(nodes):
            return False
        node = nodes[index]
        if checkpoint.position > index * page_tokens + node.num_tokens:
            return False
        checkpoint.owner = node.checkpoints
        node.checkpoints.append(checkpoint)
        return True

    def touch(self, nodes: Sequence[PageNode]) -> None:
        """Counts a path as used now."""
        for node in reversed(nodes):
            tier = self._on_host if node.is_on_host else self._on_device
            del tier[node]
            tier[node] = None

    @contextmanager
    def keeping(self, nodes: Sequence[PageNode]) -> Generator[None]:
        """Keeps nodes where they are while pages are freed for them."""
        held = [node.page_id for node in nodes if not node.is_on_host]
        self._pages.share(held)
        self._kept.update(nodes)
        try:
            yield
        finally:
            self._kept.clear()
            self._pages.release(held)

    def evict(self, num_pages: int) -> int:
        """Frees pages that nobody but the index holds, and returns how many.

        What they hold goes to the host if that has room. Raises whatever the device raises;
        nothing was freed then.
        """
        chosen: dict[PageNode, None] = {}
        for node in self._on_device:
            if len(chosen) == num_pages:
                break
            children = (child for child in node.children.values() if not child.is_on_host)
            is_idle = self._pages.num_holders(node.page_id) == 1
            if is_idle and all(child in chosen for child in children):
                chosen[node] = None
        self._spill(list(chosen))
        return len(chosen)

    def lift(self, node: PageNode, page_id: int) -> None:
        """Moves a node from the host to a page that holds its content now."""
        assert node.content is not None
        self.host_tier.give_back(node.content, node.key)
        node.content, node.page_id = None, page_id
        self._pages.share([page_id])
        del self._on_host[node]
        self._on_device[node] = None

    def drop(self, node: PageNode) -> int:
        """Forgets a node and all that continues it; returns how many pages became free."""
        freed = 0
        for each in reversed([node, *_descendants(node)]):
            for checkpoint in list(each.checkpoints):
                checkpoint.drop()
            freed += self._take_off(each)
        return freed

    def clear(self) -> None:
        """Forgets everything."""
        for root in list(self._roots.values()):
            for child in list(root.children.values()):
                self.drop(child)

    def check_integrity(self) -> None:
        """Proves that the tree and its lists agree.

        Raises:
            PoolCorruption: they do not.
        """
        listed = {node for root in self._roots.values() for node in _descendants(root)}
        if listed != {*self._on_device, *self._on_host}:
            raise PoolCorruption("the prefix index lists nodes that are not in its tree")
        if len(set(self.held_pages())) < len(self._on_device):
            raise PoolCorruption("a page is listed twice: who writes on in it breaks the other")
        ages = {node: age for age, node in enumerate(self._on_device)}
        for node in listed:
            if sorted(node.children) != node.order or node.is_on_host == bool(node.page_id):
                raise PoolCorruption(f"a node of the prefix index is torn: {node.page_id}")
            for child in node.children.values():
                if len(node.key) < self._page_bytes or (node.is_on_host and not child.is_on_host):
                    raise PoolCorruption("a page continues one that is not whole or not there")
                if not child.is_on_host and ages[child] > ages[node]:
                    raise PoolCorruption("a page is younger than the one before it")
        self.host_tier.check_integrity([n.content for n in self._on_host if n.content])

    def _root(self, root: PrefixRoot) -> PageNode:
        return self._roots.setdefault(root, PageNode(None, b"", 0))

    def _add(self, parent: PageNode, key: bytes, page_id: int) -> PageNode:
        node = PageNode(parent, key, page_id)
        self._pages.share([page_id])
        parent.children[key] = node
        insort(parent.order, key)
        self._on_device[node] = None
        return node

    def _take_off_partial(self, key: bytes, nodes: list[PageNode]) -> list[Checkpoint]:
        """Takes a last page that has more tokens now off the list; returns its checkpoints."""
        if not nodes or len(nodes[-1].key) == self._page_bytes:
            return []
        if len(key) <= (len(nodes) - 1) * self._page_bytes + len(nodes[-1].key):
            return []
        last = nodes.pop()
        self._take_off(last)
        return last.checkpoints

    def _take_off(self, node: PageNode) -> int:
        parent = node.parent
        assert parent is not None, "a root is never taken off"
        del parent.children[node.key]
        del parent.order[bisect_left(parent.order, node.key)]
        if parent.parent is None and not parent.children:
            self._roots = {name: root for name, root in self._roots.items() if root is not parent}
        if node.content is not None:
            self.host_tier.give_back(node.content, node.key)
            del self._on_host[node]
            return 0
        del self._on_device[node]
        return self._pages.release([node.page_id])

    def _spill(self, nodes: Sequence[PageNode]) -> None:
        """Moves nodes to the host, children first; what has no room there is dropped."""
        room = [node for node in nodes if self.host_tier.admits(node.key)]
        contents = self.host_tier.read([(node.page_id, node.num_tokens) for node in room])
        saved = dict(zip(room, contents, strict=True))
        for node in nodes:
            content = saved.get(node)
            if content is None or not self._make_host_room(content, node):
                self.drop(node)
                continue
            self.host_tier.take(content, node.key)
            del self._on_device[node]
            self._pages.release([node.page_id])
            node.content, node.page_id = content, 0
            self._on_host[node] = None

    def _make_host_room(self, content: PageContent, keep: PageNode) -> bool:
        while not self.host_tier.has_room(content, keep.key):
            oldest = next(
                (n for n in self._on_host if not n.children and n not in self._kept), None
            )
            if oldest is None:
                return False
            self.drop(oldest)
        return True


def _closest(node: PageNode, key: bytes) -> tuple[PageNode | None, int]:
    """The child with the longest common prefix, which is a neighbour in their order."""
    if not key:
        return None, 0
    at = bisect_left(node.order, key)
    best, most = None, 0
    for neighbour in node.order[max(0, at - 1) : at + 1]:
        shared = _common_tokens(neighbour, key)
        if shared > most:
            best, most = node.children[neighbour], shared
    return best, most


def _common_tokens(one: bytes, other: bytes) -> int:
    end = min(len(one), len(other))
    at = next((i for i in range(end) if one[i] != other[i]), end)
    return at // _TOKEN_BYTES


def _descendants(node: PageNode) -> Iterator[PageNode]:
    """All nodes below, every parent before its children; paths are too long for recursion."""
    waiting = [*node.children.values()]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += each.children.values()
