"""Nothing of a stop string is ever shown, and nothing else is held back."""

from hypothesis import given
from hypothesis import strategies as st

from frontend.stop_strings import StopMatcher, StopStrings


def read(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None]:
    """What is shown for each piece, and the stop string found; with the flush at the end."""
    matcher = StopMatcher(StopStrings(stops))
    shown = []
    for piece in pieces:
        text, found = matcher.feed(piece)
        shown.append(text)
        if found is not None:
            return shown, found
    return [*shown, matcher.flush()], None


def naive(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """The same, by looking at each prefix of the whole text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    pieces=st.lists(st.text(alphabet="abc", max_size=6)),
)
def test_equals_the_naive_search_however_the_text_is_cut(stops, pieces):
    shown, found = read(stops, pieces)
    assert ("".join(shown), found) == naive(stops, "".join(pieces))


@given(
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    pieces=st.lists(st.text(alphabet="abc", max_size=6)),
)
def test_holds_back_only_what_may_become_a_stop_string(stops, pieces):
    matcher = StopMatcher(StopStrings(stops))
    read_so_far = shown_so_far = ""
    for piece in pieces:
        text, found = matcher.feed(piece)
        if found is not None:
            return
        read_so_far += piece
        shown_so_far += text
        held = read_so_far[len(shown_so_far) :]
        assert read_so_far == shown_so_far + held
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_nothing_of_a_stop_string_is_streamed():
    assert read(("DEFGHIJ",), ["ABC ", "D", "EF", "GHI", "J", "K"]) == (["ABC ", "", "", "", ""], "DEFGHIJ")


def test_a_stop_string_inside_a_piece():
    assert read(("DE",), ["ABC", "DEF"]) == (["ABC", ""], "DE")


def test_an_unfinished_stop_string_is_shown_at_the_end():
    assert read(("DEFGHIJ",), ["ABC D", "EF"]) == (["ABC ", "", "DEF"], None)


def test_a_false_start_is_shown_as_soon_as_it_is_one():
    assert read(("aab",), ["a", "a", "a", "c"]) == (["", "", "a", "aac", ""], None)


def test_characters_that_mean_something_in_patterns():
    for stop in ("]", "^", "\\", "-", ".", "[a"):
        assert read((stop,), ["x" + stop]) == (["x"], stop)


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.integers(0, 12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_what_completes_too_early_is_passed_over_and_nothing_is_lost(pieces, early_count, strings):
    text, early = "".join(pieces), len("".join(pieces[:early_count]))
    ends = [(end, stop) for end in range(early + 1, len(text) + 1) for stop in strings if text[:end].endswith(stop)]
    end, stop = min(ends, key=lambda found: (found[0], -len(found[1])), default=(len(text), None))
    matcher, shown = StopMatcher(StopStrings(tuple(strings))), ""
    for number, piece in enumerate(pieces):
        emitted, found = matcher.feed(piece, may_end=number >= early_count)
        shown += emitted
        if found is not None:
            break
    else:
        found = None
        shown += matcher.flush()
    assert (shown, found) == (text[: end - len(stop or "")], stop)
