"""Caches of bounded size: entries that were not used for the longest time are evicted, and state is freed
with its owner."""

import gc
import random
from collections import OrderedDict

import pytest
import torch

from tritoncp.core.bounded_cache import BoundedCache, OwnedState, TensorCache


@pytest.mark.parametrize("seed", range(4))
def test_the_least_recently_used_entries_are_evicted(seed):
    draw, cache, expected = random.Random(seed), BoundedCache(5, weigh=abs, max_weight=12), OrderedDict()
    for _ in range(500):
        key = draw.randrange(9)
        assert cache.get(key) == expected.get(key)
        if key in expected:
            expected.move_to_end(key)
        if draw.random() < 0.5:
            value = draw.randrange(1, 20)
            assert cache.put(key, value) == value
            expected[key] = value
            expected.move_to_end(key)
            while len(expected) > 5 or (len(expected) > 1 and sum(expected.values()) > 12):
                expected.popitem(last=False)
        assert set(cache) == set(expected) and len(cache) == len(expected)


def test_a_cached_value_serves_only_the_same_unedited_tensors():
    cache, tensors = TensorCache(4), [torch.ones(3), torch.zeros(2)]
    cache.keep("key", tensors, "value")
    assert cache.find("key", tensors) == "value" and cache.find("other", tensors) is None
    assert cache.find("key", [tensors[0], tensors[1].clone()]) is None
    tensors[0].add_(1)
    assert cache.find("key", tensors) is None
    with torch.inference_mode():
        tensors[0] = torch.ones(3)
    cache.keep("uncounted edits", tensors, "value")
    assert cache.find("uncounted edits", tensors) is None


def test_state_is_freed_with_its_owner():
    class Group:
        pass

    state, group = OwnedState(list), Group()
    state.of(group).append(1)
    state.of(None).append(2)
    assert state.of(group) == [1] and state.of(None) == [2]
    del group
    gc.collect()
    assert state.values() == [[2]]
