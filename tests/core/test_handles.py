"""Tests of handles: their value alone names an object, in this process and in no other."""

import gc
import pickle

import pytest
import torch

from tests.command_process import run_code
from tritoncp import sliding_window
from tritoncp.core.handles import handle_of, object_of, stand_for


class Thing:
    pass


@pytest.mark.long
def test_copies_of_a_handle_name_its_object_while_it_is_alive():
    thing, ref = Thing(), None
    handle = handle_of(thing)
    for copy in (handle.clone(), torch.from_numpy(handle.numpy().copy()), pickle.loads(pickle.dumps(handle))):
        assert object_of(copy) is thing
    assert torch.equal(handle_of(thing), handle)  # one number for each object, however often it is asked for
    view, kept, copy = handle[None], id(thing), handle.clone()
    del handle, thing, ref
    gc.collect()
    assert id(object_of(copy)) == kept  # by the memory of the view
    del view
    gc.collect()
    with pytest.raises(RuntimeError, match="was freed: keep it"):
        object_of(copy)


@pytest.mark.long
def test_an_object_that_refers_to_its_handle_is_freed_with_its_last_reference():
    state, thing = Thing(), Thing()
    thing.handle = handle_of(state)
    stand_for(thing, thing.handle)
    copy = thing.handle.clone()
    assert object_of(copy) is thing
    handle = thing.handle
    del thing
    gc.collect()
    assert object_of(copy) is state
    del handle, state
    gc.collect()
    with pytest.raises(RuntimeError, match="was freed"):
        object_of(copy)


def test_a_handle_of_an_equal_object_outlives_the_first_object():
    first = handle_of(sliding_window(5))
    second = handle_of(sliding_window(5))
    del first
    gc.collect()
    assert object_of(second) == sliding_window(5)


FORKED = """
import os
from tritoncp.core.handles import handle_of, object_of
before = handle_of(print)
r, w = os.pipe()
if not (child := os.fork()):
    assert object_of(before) is print
    os.write(w, str(int(handle_of(list))).encode())
    os._exit(0)
os.waitpid(child, 0)
theirs, ours = int(os.read(r, 100)), int(handle_of(list))
assert len({theirs, ours, int(before)}) == 3
try:
    object_of(before.new_tensor(theirs))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.long
def test_processes_number_objects_differently_also_after_a_fork():
    assert "traced in another process" in run_code(FORKED)
