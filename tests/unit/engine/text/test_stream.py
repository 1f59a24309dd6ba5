from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stream import Release, TextStream

TEXT = st.text("ab\u00e9\u4e2d\U0001f642\n", max_size=24)
STOPS = st.lists(st.text("ab\u00e9\u4e2d\U0001f642", min_size=1, max_size=5), max_size=3)


def cut(text: bytes, sizes: list[int]) -> list[bytes]:
    """Cuts a text into pieces of the given sizes, over and over."""
    pieces: list[bytes] = []
    while text:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def cut_text(text: str, sizes: list[int]) -> list[str]:
    pieces: list[str] = []
    while text:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def run(pieces: list[bytes], stops: list[str], *, ends: bool) -> tuple[list[Release], TextStream]:
    stream = TextStream(stops)
    releases: list[Release] = []
    for number, piece in enumerate([*pieces, b""] if ends else pieces):
        releases.append(stream.push(piece, is_eog=ends and number == len(pieces)))
        if releases[-1].stop_string is not None:
            break
    return releases, stream


def until_stop(pieces: list[str], stops: list[str]) -> str:
    """The text before the earliest of the stop strings that the first piece completes."""
    text = ""
    for piece in pieces:
        text += piece
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)]
    return text


class TestProperties:
    @settings(max_examples=400, deadline=None)
    @given(TEXT, STOPS, st.lists(st.integers(1, 4), min_size=1, max_size=6))
    def test_streamed_is_whole_up_to_the_first_stop(
        self, text: str, stops: list[str], sizes: list[int]
    ) -> None:
        # Pieces end where characters end: what happens inside is in the next property.
        pieces = cut_text(text, sizes)
        releases, stream = run([piece.encode() for piece in pieces], stops, ends=True)
        assert "".join(r.text for r in releases) == until_stop(pieces, stops)
        assert stream.unsent() == ""

    @settings(max_examples=400, deadline=None)
    @given(TEXT, st.lists(st.integers(1, 5), min_size=1, max_size=6))
    def test_splits_inside_characters_never_show(self, text: str, sizes: list[int]) -> None:
        releases, _ = run(cut(text.encode(), sizes), [], ends=False)
        assert "".join(r.text for r in releases) == text
        assert not any("\ufffd" in r.text for r in releases)

    @settings(max_examples=400, deadline=None)
    @given(TEXT, STOPS, st.lists(st.integers(1, 5), min_size=1, max_size=6))
    def test_nothing_leaves_that_may_still_become_a_stop(
        self, text: str, stops: list[str], sizes: list[int]
    ) -> None:
        stream, sent = TextStream(stops), ""
        for piece in cut(text.encode(), sizes):
            release = stream.push(piece)
            if release.stop_string is not None:
                return
            sent += release.text
            if release.text:
                assert not any(
                    sent.endswith(stop[:length])
                    for stop in stops
                    for length in range(1, len(stop) + 1)
                )

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.binary(max_size=5), max_size=12), STOPS)
    def test_any_bytes_come_out_once(self, pieces: list[bytes], stops: list[str]) -> None:
        releases, stream = run(pieces, stops, ends=False)
        if any(release.stop_string is not None for release in releases):
            return
        shown = "".join(release.text for release in releases) + stream.unsent()
        whole = b"".join(pieces).decode("utf-8", "replace")
        # Where pieces meet, one damaged sequence may be shown as more than one.
        assert shown.replace("\ufffd", "") == whole.replace("\ufffd", "")


class TestStops:
    def test_a_stop_over_three_tokens(self) -> None:
        releases, _ = run([b"the E", b"N", b"D."], ["END"], ends=False)
        assert [r.text for r in releases] == ["", "", "the "]
        assert releases[-1].stop_string == "END"

    def test_the_earliest_hit_wins_and_the_first_given_of_two_at_one_place(self) -> None:
        assert TextStream(["cd", "bc"]).push(b"abcd") == Release("a", stop_string="bc")
        assert TextStream(["bcd", "bc"]).push(b"abcd") == Release("a", stop_string="bcd")

    def test_a_false_start_is_released_whole(self) -> None:
        releases, _ = run([b"aE", b"N", b"x"], ["END"], ends=False)
        assert [r.text for r in releases] == ["", "", "aENx"]

    def test_a_repeating_stop_is_followed_through_its_own_beginnings(self) -> None:
        releases, _ = run([b"a", b"a", b"b", b"a", b"a", b"c"], ["aabaac"], ends=False)
        assert releases[-1] == Release("", stop_string="aabaac")
        releases, _ = run([b"aab", b"aab", b"aac"], ["aabaac"], ends=False)
        assert releases[-1] == Release("aab", stop_string="aabaac")

    def test_end_of_generation_sets_the_rest_free(self) -> None:
        releases, stream = run([b"aE"], ["END"], ends=True)
        assert [r.text for r in releases] == ["", "aE"]
        assert stream.unsent() == ""

    def test_an_empty_stop_ends_at_the_first_token(self) -> None:
        assert TextStream([""]).push(b"Hi") == Release("", stop_string="")

    def test_what_is_held_back_can_be_read(self) -> None:
        stream = TextStream(["END"])
        assert stream.push(b"an E").text == ""
        assert stream.unsent() == "an E"


class TestCharacters:
    def test_inside_a_character_nothing_is_looked_at(self) -> None:
        stream = TextStream(["a"])
        assert stream.push(b"a\xf0\x9f") == Release("", mid_character=True)
        assert stream.unsent() == "a\ufffd"
        # The piece that completes the character is searched, the one before is not, as in
        # llama-server.
        assert stream.push(b"\x99\x82") == Release("a\U0001f642")

    def test_an_end_inside_a_character_keeps_it(self) -> None:
        stream = TextStream([])
        assert stream.push(b"a\xe4\xb8").mid_character
        assert stream.push(b"", is_eog=True) == Release("", mid_character=True)
        assert stream.unsent() == "a\ufffd"

    def test_bytes_that_are_no_text_print_as_replacements(self) -> None:
        assert TextStream([]).push(b"a\xffb").text == "a\ufffdb"
