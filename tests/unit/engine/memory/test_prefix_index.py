"""The index against a plain list of the sequences that it was given."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.checkpoint import Checkpoint, Checkpoints
from engine.memory.host_tier import NODE_BYTES, HostTier, HostUse
from engine.memory.pages import PageAllocator
from engine.memory.prefix_index import PageNode, PrefixIndex, PrefixRoot, encode
from engine.step import SequenceWork, StepBatch
from engine.types import PoolKind
from tests.fake_logits import tokens_of
from tests.fake_runner import FakeRunner

PAGE = 4
ROOT = PrefixRoot(b"model", "f16", b"", "")


class Books:
    """A pool, an index over it and the sequences that hold pages, as slots would."""

    def __init__(self, size: int = 64, limit_bytes: int | None = 0) -> None:
        self.pages = PageAllocator(size)
        self.runner = FakeRunner(size, PAGE)
        self.host = HostTier(self.runner, limit_bytes=limit_bytes)
        self.index = PrefixIndex(self.pages, PAGE, self.host)
        self.held: list[list[int]] = []

    def hold(
        self, tokens: Sequence[int], root: PrefixRoot = ROOT
    ) -> tuple[list[int], list[PageNode]]:
        """A sequence evaluated on pages of its own, then listed."""
        pages = self.pages.allocate(-(-len(tokens) // PAGE))
        self.runner.run(StepBatch((), SequenceWork(tokens, 0, pages, False)))
        nodes: list[PageNode] = []
        self.index.insert(root, encode(tokens), pages, nodes)
        self.held.append(pages)
        return pages, nodes

    def let_go(self, pages: list[int]) -> None:
        self.held.remove(pages)
        self.pages.release(pages)

    def cache(self, tokens: Sequence[int], root: PrefixRoot = ROOT) -> None:
        self.let_go(self.hold(tokens, root)[0])

    def match(self, tokens: Sequence[int], root: PrefixRoot = ROOT) -> int:
        """The length of the match, whose pages must hold these tokens."""
        match = self.index.match(root, encode(tokens))
        found: list[int] = []
        for node in match.nodes:
            content = node.content
            if content is None:
                content = self.runner.read_pages(PoolKind.KV, [node.page_id]).wait()
            found += tokens_of(content).tolist()[:PAGE]
        assert found[: match.num_tokens] == list(tokens[: match.num_tokens])
        return match.num_tokens

    def check(self) -> None:
        self.index.check_integrity()
        self.pages.check_integrity([*self.held, self.index.held_pages()])


def _room_for(num_pages: int) -> int:
    """The limit of a tier of so many small pages, whose books take more than their content."""
    return 20 * num_pages * (NODE_BYTES + 4 * PAGE)


@pytest.mark.parametrize(
    ("prompt", "shared"),
    [
        ([1, 2, 3, 4, 5, 6], 6),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 6),
        ([1, 2, 3, 4, 5, 9], 5),
        ([1, 2, 3, 4], 4),
        ([1, 2, 3], 3),
        ([1, 9], 1),
        ([9, 2, 3, 4, 5, 6], 0),
        ([2, 3, 4, 5, 6], 0),
        ([], 0),
    ],
)
def test_a_match_is_the_longest_common_prefix(prompt: list[int], shared: int) -> None:
    books = Books()
    books.cache([1, 2, 3, 4, 5, 6])
    assert books.match(prompt) == shared


TOKENS = st.lists(st.integers(0, 2), max_size=11)
ROOTS = [
    ROOT,
    PrefixRoot(b"model", "f16", b"", "tenant"),
    PrefixRoot(b"model", "f16", b"adapter", ""),
    PrefixRoot(b"model", "f32", b"", ""),
    PrefixRoot(b"other", "f16", b"", ""),
]


def longest(sequences: Sequence[Sequence[int]], prompt: Sequence[int]) -> int:
    def shared(one: Sequence[int]) -> int:
        pairs = list(zip(one, prompt, strict=False))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))

    return max(map(shared, sequences), default=0)


def _short_hash(root: PrefixRoot) -> int:
    return len(root.tenant) % 2


@given(
    kept=st.lists(st.tuples(st.integers(0, 4), TOKENS), max_size=12),
    prompt=TOKENS,
    root=st.integers(0, 4),
    is_hash_short=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_any_sequence_is_found_under_its_root_and_no_other(
    kept: list[tuple[int, list[int]]], prompt: list[int], root: int, is_hash_short: bool
) -> None:
    """Every root's hash cut to 2 values: the answers are still right."""
    books = Books()
    with pytest.MonkeyPatch.context() as patch:
        if is_hash_short:
            patch.setattr(PrefixRoot, "__hash__", _short_hash)
        for number, tokens in kept:
            if tokens:
                books.cache(tokens, ROOTS[number])
            books.check()
        own = [tokens for number, tokens in kept if number == root]
        assert books.match(prompt, ROOTS[root]) == longest(own, prompt)


def test_the_same_page_is_listed_once_and_shared() -> None:
    books = Books()
    one, _ = books.hold([1, 2, 3, 4, 5])
    other, nodes = books.hold([1, 2, 3, 4, 6, 7])
    assert other[0] == one[0]
    assert books.pages.num_free == 64 - 3
    assert [node.page_id for node in nodes] == other
    books.check()


def test_a_sequence_that_goes_on_grows_its_last_page() -> None:
    books = Books()
    pages = books.pages.allocate(2)
    books.held.append(pages)
    nodes: list[PageNode] = []
    tokens = [1, 2, 3, 4, 5, 6, 7]
    books.runner.run(StepBatch((), SequenceWork(tokens, 0, pages, False)))
    for end in (2, 3, 4, 5, 7):
        books.index.insert(ROOT, encode(tokens[:end]), pages, nodes)
        books.check()
        assert books.match(tokens) == end
        assert len(books.index.held_pages()) == -(-end // PAGE)


def test_eviction_takes_the_least_recently_used_ends_first_and_nothing_in_use() -> None:
    books = Books()
    books.cache([1, 2, 3, 4, 5, 6, 7, 8])
    in_use, _ = books.hold([1, 2, 3, 4, 9])
    books.cache([7, 7, 7, 7, 7])
    assert books.index.evict(1) == 1
    assert books.match([1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert books.index.evict(9) == 2
    assert (books.match([7, 7]), books.match([1, 2, 3, 4, 9])) == (0, 5)
    assert books.index.evict(9) == 0
    books.let_go(in_use)
    assert books.index.evict(9) == 2
    assert books.pages.num_free == 64
    books.check()


def test_a_match_that_is_used_is_younger_than_others() -> None:
    books = Books()
    books.cache([1, 1, 1, 1])
    books.cache([2, 2, 2, 2])
    books.index.touch(books.index.match(ROOT, encode([1, 1, 1, 1])).nodes)
    books.index.evict(1)
    assert (books.match([1, 1]), books.match([2, 2])) == (2, 0)


def test_what_is_evicted_goes_to_the_host_and_comes_back() -> None:
    books = Books(limit_bytes=None)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    books.cache(tokens)
    assert books.index.evict(3) == 3
    assert (books.pages.num_free, books.index.num_host_nodes) == (64, 3)
    assert books.match(tokens) == 9
    books.check()
    nodes = books.index.match(ROOT, encode(tokens)).nodes[:2]
    pages = books.pages.allocate(2)
    books.held.append(pages)
    books.host.write(pages, [node.content for node in nodes if node.content])
    for node, page_id in zip(nodes, pages, strict=True):
        books.index.lift(node, page_id)
    books.index.touch(nodes)
    assert books.match(tokens) == 9
    assert books.index.num_host_nodes == 1
    books.check()


def test_the_host_keeps_the_beginnings_when_it_is_full() -> None:
    books = Books(limit_bytes=_room_for(2))
    books.cache([1] * 12)
    assert books.index.evict(3) == 3
    assert books.match([1] * 12) == 8
    books.cache([2] * 4)
    books.index.evict(9)
    assert (books.match([1] * 12), books.match([2] * 4)) == (4, 4)
    books.check()


def test_a_host_that_has_no_room_for_one_page_keeps_none() -> None:
    books = Books(limit_bytes=100)
    books.cache([1] * 12)
    assert books.index.evict(2) == 2
    assert (books.match([1] * 12), books.index.num_host_nodes) == (4, 0)
    books.check()


def test_a_read_that_fails_evicts_nothing() -> None:
    books = Books(limit_bytes=None)
    books.cache([1] * 12)
    books.runner.fail_transfer_with = MemoryError()
    with pytest.raises(MemoryError):
        books.index.evict(2)
    assert books.match([1] * 12) == 12
    books.check()


def test_what_is_kept_for_a_request_stays_on_the_host_and_the_device() -> None:
    books = Books(limit_bytes=_room_for(1))
    books.cache([1] * 8)
    books.index.evict(1)
    nodes = books.index.match(ROOT, encode([1] * 8)).nodes
    books.cache([2] * 8)
    with books.index.keeping(nodes):
        assert books.index.evict(9) == 2
        assert books.match([1] * 8) == 8
    books.index.evict(9)
    assert books.match([1] * 8) == 0 or books.match([2] * 8) == 0
    books.check()


def test_forgetting_a_page_forgets_all_that_continues_it() -> None:
    depth = 3000  # deeper than the interpreter recurses
    tokens = [1] * PAGE * depth
    books = Books(size=depth)
    books.runner.max_chunk = len(tokens)
    books.cache(tokens)
    (first, *_) = books.index.match(ROOT, encode(tokens)).nodes
    assert books.index.drop(first) == depth
    books.check()
    assert books.match(tokens) == 0


def test_checkpoints_go_with_their_page() -> None:
    books = Books()
    windows = PageAllocator(8)
    checkpoints = Checkpoints(windows)
    pages, nodes = books.hold([1, 2, 3, 4, 5, 6])
    own = windows.allocate(2)
    found = [Checkpoint(position, 1, window_pages=tuple(own)) for position in (4, 6, 7)]
    for checkpoint in found:
        checkpoints.add(checkpoint)
    assert [books.index.attach(nodes, checkpoint) for checkpoint in found] == [True, True, False]
    found[2].drop()
    # The last page grows, and what was kept at its end stays.
    more = pages[:]
    books.held[0] = more
    books.index.insert(ROOT, encode([1, 2, 3, 4, 5, 6, 7]), more, nodes)
    assert [c.position for node in nodes for c in node.checkpoints] == [4, 6]
    windows.release(own)
    assert windows.num_free == 6
    books.let_go(more)
    books.index.evict(1)
    assert (len(checkpoints), windows.num_free) == (1, 6)
    books.index.evict(1)
    assert (len(checkpoints), windows.num_free) == (0, 8)


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=100, deadline=None)
def test_any_program_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    books = Books(size=24, limit_bytes=rng.choice([0, _room_for(4), None]))
    for _ in range(60):
        tokens = rng.choices([1, 2], k=rng.randint(1, 14))
        match rng.randrange(5):
            case 0 | 1 if books.pages.num_free >= 4:
                books.hold(tokens, rng.choice(ROOTS[:2]))
            case 2 if books.held:
                books.let_go(rng.choice(books.held))
            case 3:
                books.index.evict(rng.randint(1, 5))
            case _:
                books.match(tokens, rng.choice(ROOTS[:2]))
        books.check()
    for pages in list(books.held):
        books.let_go(pages)
    books.index.evict(24)
    assert books.pages.num_free == 24
    books.index.clear()
    books.check()
    assert books.host.used == HostUse()


class Cached:
    """Pages that were evaluated, of 256 bytes a token, about to lose their place to the host."""

    def __init__(self, page_tokens: int, num_pages: int, limit_bytes: int | None) -> None:
        self.num_pages = num_pages
        self.pages = PageAllocator(num_pages)
        self.runner = FakeRunner(num_pages, page_tokens, max_chunk=page_tokens * num_pages)
        assert self.runner.page_layout(PoolKind.KV).token_bytes == 256
        self.host = HostTier(self.runner, limit_bytes=limit_bytes)
        self.index = PrefixIndex(self.pages, page_tokens, self.host)
        self.tokens = random.Random(5).choices(range(100), k=page_tokens * num_pages)
        self.held = self.pages.allocate(num_pages)
        self.runner.run(StepBatch((), SequenceWork(self.tokens, 0, self.held, False)))

    def spill(self) -> None:
        self.index.insert(ROOT, encode(self.tokens), self.held, [])
        self.pages.release(self.held)
        self.index.evict(self.num_pages)


@pytest.mark.parametrize("page_tokens", [1, 4, 32, 128])
def test_the_books_are_a_twentieth_of_the_limit_at_most(page_tokens: int) -> None:
    """Whatever a page holds and however many there would be; see below for what books are."""
    limit = 400_000
    cached = Cached(page_tokens, 1600, limit)
    cached.spill()
    cached.index.check_integrity()
    books_bytes = NODE_BYTES + 4 * page_tokens
    most = min(limit // 20 // books_bytes, limit // (books_bytes + 256 * page_tokens))
    assert cached.index.num_host_nodes == most
    assert cached.host.used == HostUse(most * 256 * page_tokens, most * books_bytes)


@pytest.mark.parametrize("page_tokens", [1, 32])
def test_the_books_are_what_the_interpreter_takes(page_tokens: int) -> None:
    cached = Cached(page_tokens, 400, None)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        cached.spill()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cached.index.num_host_nodes == 400
    assert after - before <= cached.host.used.total
