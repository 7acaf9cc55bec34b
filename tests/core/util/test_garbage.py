"""Engines leave what was there when they were ready out of full collections, and give it back when they end."""

import gc
import weakref

import pytest

from hookline.core.util import garbage
from hookline.core.util.garbage import freeze_heap, imports_kept, search_frozen, settled, unsearched


@pytest.fixture(autouse=True)
def nobody_froze(monkeypatch):
    """A process in which no engine is open, whatever this one has."""
    monkeypatch.setattr(garbage, "_OURS", garbage._Ours())
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_collection(monkeypatch):
    """Where it does not matter, a full collection of the suite's own heap takes too long."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


class Circle:
    """An object that only a collection frees."""

    def __init__(self):
        self.itself = self


@pytest.mark.slow
def test_what_is_there_is_frozen_after_one_collection_and_given_back_in_the_end():
    lost = weakref.ref(Circle())
    heap = freeze_heap()
    assert lost() is None and gc.get_freeze_count() > 10_000
    with heap.thawed():
        pass
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_what_circles_hold_is_found_while_the_engine_ends():
    circle = Circle()
    heap, held = freeze_heap(), weakref.ref(circle)
    del circle
    with heap.thawed():
        gc.collect()
        assert held() is None


@pytest.mark.slow
def test_of_two_engines_the_last_one_gives_it_back(no_collection):
    first, second = freeze_heap(), freeze_heap()
    with first.thawed():
        assert gc.get_freeze_count() == 0
    assert gc.get_freeze_count() > 10_000
    with second.thawed():
        pass
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_engines_that_end_at_once_leave_nothing_frozen(no_collection):
    first, second = freeze_heap(), freeze_heap()
    with first.thawed(), second.thawed():
        pass
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_a_process_that_froze_before_is_left_as_it_is():
    gc.freeze()
    before = gc.get_freeze_count()
    assert freeze_heap() is None
    assert 0 < gc.get_freeze_count() <= before


@pytest.mark.slow
def test_what_others_froze_later_stays_frozen(no_collection):
    heap, later = freeze_heap(), [[] for _ in range(1000)]
    gc.freeze()
    with heap.thawed():
        pass
    assert gc.get_freeze_count() > len(later)


def test_what_a_child_process_imports_is_kept_and_collections_go_on_afterwards():
    with imports_kept():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() > 10_000


class FakeCollector:
    """Python's, as far as freezing goes. searched: how many objects were frozen during each collection."""

    def __init__(self):
        self.num_frozen, self.searched = 0, []

    def freeze(self):
        self.num_frozen = 10_000

    def unfreeze(self):
        self.num_frozen = 0

    def get_freeze_count(self):
        return self.num_frozen

    def collect(self):
        self.searched.append(self.num_frozen)


@pytest.fixture
def collector(monkeypatch):
    made = FakeCollector()
    monkeypatch.setattr(garbage, "gc", made)
    return made


def test_while_it_is_settled_all_is_frozen_after_one_collection(collector):
    with settled():
        assert collector.num_frozen == 10_000
    assert collector.num_frozen == 0 and collector.searched == [0]


def test_what_was_frozen_before_it_was_settled_stays_so_and_no_more_is_frozen(collector):
    collector.num_frozen = 5_000
    with settled():
        assert collector.num_frozen == 5_000
    assert collector.num_frozen == 5_000 and collector.searched == [5_000]


def test_what_is_frozen_is_searched_unless_an_engine_is_at_work(collector):
    first, second = freeze_heap(), freeze_heap()
    del collector.searched[:]
    second.is_idle = False
    search_frozen()
    assert collector.searched == []
    second.is_idle = True
    search_frozen()
    assert collector.searched == [0] and collector.num_frozen == 10_000
    with first.thawed(), second.thawed():
        pass
    assert collector.num_frozen == 0


def test_what_python_itself_has_frozen_is_nobodys(collector):
    collector.num_frozen = 375  # with which Python 3.12 begins
    heap = freeze_heap()
    assert heap is not None and collector.num_frozen == 10_000
    search_frozen()
    assert collector.searched == [375, 0] and collector.num_frozen == 10_000
    with heap.thawed():
        pass
    assert collector.num_frozen == 0


def test_what_others_froze_is_not_searched_nor_anything_without_an_engine(collector):
    search_frozen()
    freeze_heap()
    collector.num_frozen += 1
    del collector.searched[:]
    search_frozen()
    assert collector.searched == [] and collector.num_frozen == 10_001


@pytest.mark.parametrize("was_enabled", [True, False])
def test_a_start_is_not_searched_and_leaves_the_collector_as_it_was(was_enabled):
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(ValueError), unsearched():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
