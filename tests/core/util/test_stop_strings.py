"""Stop strings in text that comes in pieces: found as if it came letter by letter, and never shown in part."""

import tracemalloc
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.util.stop_strings import StopSearch, StopStrings
from tests.fuzzing import examples

LETTERS = st.text(alphabet="ab\n", max_size=12)


def letter_by_letter(text, stops, include):
    """What is left of a text, and the stop string that ended it."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def search(pieces, stops, include=False):
    finder, shown = StopSearch(stops, include=include), []
    for piece in pieces:
        text, stop = finder.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, finder.flush()], None


@settings(max_examples=examples(150), deadline=None)
@given(
    pieces=st.lists(LETTERS, max_size=8),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_the_pieces_do_not_matter(pieces, stops, include):
    shown, stop = search(pieces, stops, include)
    assert ("".join(shown), stop) == letter_by_letter("".join(pieces), stops, include)


@settings(max_examples=examples(150), deadline=None)
@given(
    pieces=st.lists(LETTERS, max_size=8),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_what_was_shown_is_never_taken_back_and_nothing_else_is_kept(pieces, stops):
    finder, shown, fed = StopSearch(stops), "", ""
    for piece in pieces:
        text, stop = finder.push(piece)
        shown, fed = shown + text, fed + piece
        if stop is not None:
            return
        kept = fed[len(shown) :]
        assert fed.startswith(shown)
        assert not kept or any(stop.startswith(kept) for stop in stops)


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one END")])
def test_a_stop_string_over_several_pieces_is_cut_exactly(include, text):
    shown, stop = search(["one", " E", "N", "D two"], ["END"], include)
    assert ("".join(shown), stop) == (text, "END")


def test_what_could_begin_a_stop_string_waits_and_comes_if_it_does_not():
    finder = StopSearch(["\n\n"])
    assert finder.push("a\n") == ("a", None)
    assert finder.push("b") == ("\nb", None)
    assert finder.push("\n") == ("", None)
    assert finder.flush() == "\n"


def test_a_stop_string_that_may_not_stop_yet_is_text_like_any_other():
    finder = StopSearch(["x"])
    assert finder.push("axb", may_stop=False) == ("axb", None)
    assert finder.push("cxd") == ("c", "x")


def test_a_stop_string_that_was_let_pass_is_not_found_again_within_the_beginning_of_another():
    search = StopSearch(["xabz", "ab"])
    assert search.push("xab", may_stop=False) == ("", None)
    assert search.push("q") == ("xabq", None)
    assert search.push("ab") == ("", "ab")


class Counting(StopStrings):
    """Counts the characters that it looks for."""

    num_looks = 0

    def _child(self, node, code):
        self.num_looks += 1
        return super()._child(node, code)


def test_memory_is_linear_in_the_stop_strings():
    stop = "".join(chr(97 + n % 23) + chr(97 + n % 19) for n in range(10_000))
    tracemalloc.start()
    finder = StopSearch([stop, stop[:5000] + "?"])
    finder.push(stop[:-1])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60 * len(stop)  # while it is made; the square of the length would be 6,000 times as much


@pytest.mark.parametrize("stops", [["a" * 8000 + "b"], ["a" * n + "b" for n in range(1, 120)], ["ab" * 4000, "b" * 9]])
def test_time_is_linear_in_the_stop_strings_and_the_text_however_the_text_comes(stops):
    automaton = Counting(stops)
    num_characters = sum(map(len, stops))
    assert automaton.num_looks <= 4 * num_characters
    for size in (1, 7, 3000):
        automaton.num_looks, finder = 0, StopSearch(automaton)
        text = ("a" * 2999 + "c") * 4
        for start in range(0, len(text), size):
            assert finder.push(text[start : start + size])[1] is None
        assert automaton.num_looks <= 3 * len(text)


def test_one_piece_costs_no_more_than_its_characters_and_those_kept_back():
    automaton = Counting(["a" * 8000 + "b"])
    finder = StopSearch(automaton)
    finder.push("a" * 8000)
    automaton.num_looks = 0
    assert finder.push("cde") == ("a" * 8000 + "cde", None)
    assert automaton.num_looks <= 8000 + 2 * 3 + 1


def test_searches_share_what_was_made_of_the_stop_strings():
    made = StopStrings(["END"])
    one, other = StopSearch(made), StopSearch(made)
    assert one.push("E") == ("", None)
    assert other.push("ND") == ("ND", None)
    assert one.push("ND") == ("", "END")


def test_every_short_text_is_searched_as_letter_by_letter():
    """A beginning that fails may hold the beginning of another match, or of the same one: "aab" in "aaab"."""

    def words(*lengths):
        return ["".join(letters) for length in lengths for letters in product("ab", repeat=length)]

    alone, few = [[stop] for stop in words(1, 2, 3, 4)], words(1, 2, 3)
    for texts, all_stops in ((words(7), alone), (words(5), combinations(few, 2))):
        for stops in all_stops:
            made = StopStrings(stops)
            for text in texts:
                shown, stop = search([text[:3], text[3:]], made)
                assert ("".join(shown), stop) == letter_by_letter(text, stops, False), (text, stops)
